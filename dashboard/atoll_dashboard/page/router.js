// Where one is: #view, #view?filter=.., #learner/NAME. The address is all there is to know, so it can be sent on.

const VIEWS = ["overview", "learners", "rounds", "receipts", "fragments", "checkpoints", "events"];

/** {view, name, query}. What is not known leads to the overview. */
export function place(hash = location.hash) {
  const [path, tail = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const query = Object.fromEntries(new URLSearchParams(tail));
  if (path.startsWith("learner/")) {
    try {
      return { view: "learner", name: decodeURIComponent(path.slice("learner/".length)), query };
    } catch {
      return { view: "learners", name: "", query: {} }; // a broken %: no name
    }
  }
  return { view: VIEWS.includes(path) ? path : "overview", name: "", query };
}

/** Puts a view's filter into the address without a step in the history. */
export function keepQuery(view, query) {
  const asked = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = new URLSearchParams(asked).toString();
  history.replaceState(null, "", `#${view}${tail ? `?${tail}` : ""}`);
}

/** arrive(place, first) at once and whenever the address changes. */
export function startRouter(arrive) {
  addEventListener("hashchange", () => arrive(place(), false));
  arrive(place(), true);
}
