// The address of a view: #view, #view?filter=.., #learner/NAME. It can be shared as a link.

const VIEWS = ["overview", "learners", "rounds", "receipts", "fragments", "checkpoints", "events"];

/** {view, name, query}. An unknown address opens the overview. */
export function place(hash = location.hash) {
  const [path, tail = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const query = Object.fromEntries(new URLSearchParams(tail));
  if (path.startsWith("learner/")) {
    try {
      return { view: "learner", name: decodeURIComponent(path.slice("learner/".length)), query };
    } catch {
      return { view: "learners", name: "", query: {} }; // an invalid % sequence
    }
  }
  return { view: VIEWS.includes(path) ? path : "overview", name: "", query };
}

/** Puts a view's filter into the address without a new history entry. */
export function keepQuery(view, query) {
  const asked = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = new URLSearchParams(asked).toString();
  history.replaceState(null, "", `#${view}${tail ? `?${tail}` : ""}`);
}

/** Calls arrive(place, first) now and after each change of the address. */
export function startRouter(arrive) {
  addEventListener("hashchange", () => arrive(place(), false));
  arrive(place(), true);
}
