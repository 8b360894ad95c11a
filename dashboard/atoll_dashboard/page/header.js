// The header with the run, its health and five figures, and the banner for old data.

import { h, keyed, set, setSign, show, sign, text } from "./dom.js";
import { about, money, rate, ratio, decimal, short, span, sum } from "./format.js";
import { oldness, problems, problemSign } from "./health.js";

const FIGURES = [
  ["Goodput, 5 min", (run) => ratio(run.goodput.recent)],
  ["Tokens/s", (run) => short(run.tokens_per_s)],
  ["Loss", (run) => decimal(run.loss, 3)],
  ["WAN", (run) => rate(sum(run.wire.up_bytes_per_s, run.wire.down_bytes_per_s))],
  ["Cost per day", ({ cost }) => (cost.per_day === null ? `– (in ${about(cost.known_in_s)})` : money(cost.per_day))],
];

const byId = (id) => document.getElementById(id);

function figure([title]) {
  return h("div", { class: "metric" }, h("dt", null, title), h("dd", null, "–"));
}

export function makeHeader() {
  const verdictSign = sign("pending");
  const first = h("a", { class: "verdict-words", href: "#overview" }, "Waiting for the first answer");
  const more = h("a", { class: "verdict-more", href: "#overview", hidden: true });
  byId("verdict").append(verdictSign, h("span", null, first, " ", more));
  const age = h("strong");
  const why = h("span");
  byId("banner").append(sign("warn"), h("p", null, age, " ", why));
  const theme = byId("theme");
  showTheme(theme);
  theme.addEventListener("click", () => {
    const order = ["automatic", "light", "dark"];
    window.atollTheme.set(order[(order.indexOf(window.atollTheme.get()) + 1) % order.length]);
    showTheme(theme);
  });
  let told = null;

  return function update(feed) {
    const run = feed.now?.run;
    const old = oldness(feed);
    const wrong = problems(feed);
    if (run) {
      text(byId("run-id"), run.run || "no run yet");
      set(byId("run-id"), "title", `generation ${run.generation}, epoch ${run.epoch}`);
      keyed(byId("metrics"), FIGURES, (each) => each[0], figure, (node, each) => text(node.lastChild, each[1](run)));
    }
    showVerdict(run, wrong, old);
    show(byId("banner"), old !== "");
    document.body.classList.toggle("old", old !== "");
    if (old !== "") {
      text(age, run ? `The data is ${span(feed.age()).replace(/\.\d/, "")} old:` : "No data yet:");
      text(why, `${old}.`);
    }
    tell(wrong, old, run);
  };

  function showVerdict(run, wrong, old) {
    if (!run && wrong.length === 0) return;
    const level = wrong[0]?.level ?? (old === "" ? "good" : "warn");
    const words = wrong[0]?.words ?? (old === "" ? "Healthy" : "Unknown: the data is old");
    set(byId("verdict"), "data-level", level);
    setSign(verdictSign, wrong.length > 0 ? problemSign(wrong[0]) : level === "good" ? "merged" : "warn");
    text(first, words.charAt(0).toUpperCase() + words.slice(1));
    set(first, "href", wrong[0]?.link ?? "#overview");
    show(more, wrong.length > 1);
    text(more, wrong.length > 1 ? `and ${wrong.length - 1} more` : "");
  }

  /** Announces problems to screen readers when they change, not every second. */
  function tell(wrong, old, run) {
    const key = JSON.stringify([wrong.map((each) => each.key), old !== "", run === undefined]);
    if (key === told) return;
    const quiet = told === null || !run;
    told = key;
    if (quiet) return;
    const words = wrong.length === 0 ? "The run is healthy." : wrong.map((each) => each.words).join("; ");
    text(byId("news"), `${old === "" ? "" : `The data is old: ${old}. `}${words}`);
  }
}

function showTheme(button) {
  text(button, `Theme: ${window.atollTheme.get()}`);
}
