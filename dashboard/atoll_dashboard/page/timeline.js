// The timeline of rounds: a group of bars per round, with one bar per learner, on the round's time axis.

import { niceStep } from "./charts.js";
import { h, keyed, roving, set, setSign, show, sign, text } from "./dom.js";
import { clipped, count, moment } from "./format.js";
import { endOf, milestones, PHASES, phasesOf, slowestFirst, standing, story } from "./phases.js";
import { learnerLink } from "./labels.js";

const MOST_ROWS = 8;
const SIGNS = { open: "pending", merging: "joining", merged: "merged", lapsed: "evicted" };

/** The legend of the bars. */
export function timelineKey() {
  const key = (name, words) => h("li", null, h("i", { class: name }), words);
  const keys = Object.entries(PHASES).map(([phase, words]) => key(`seg seg-${phase}`, words));
  const marks = ["quorum", "closed"].map((kind) => key(`mark mark-${kind}`, kind));
  return h("ul", { class: "gantt-key", "aria-label": "Phases of a round" }, ...keys, ...marks);
}

/** only(): the learner to show; "": the slowest learners. */
export function timeline({ only, nothing }) {
  const list = h("ol", { class: "rounds" });
  const empty = h("p", { class: "empty", hidden: true });
  const tip = h("div", { class: "tip", "aria-hidden": "true", hidden: true });
  const node = h("div", { class: "timeline" }, list, empty, tip);

  function point(track) {
    show(tip, track !== null);
    if (track === null) return;
    text(tip, track.getAttribute("aria-label"));
    const box = track.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${box.top > tip.offsetHeight + 150 ? box.top - tip.offsetHeight - 4 : box.bottom + 4}px`;
  }

  const trackOf = (event) => event.target.closest?.(".track") ?? null;
  node.addEventListener("pointerover", (event) => point(trackOf(event)));
  node.addEventListener("pointerleave", () => point(null));
  node.addEventListener("focusin", (event) => point(trackOf(event)));
  node.addEventListener("focusout", () => point(null));
  addEventListener("scroll", () => point(null), { passive: true });
  node.addEventListener("keydown", (event) => {
    if (event.key === "Escape") point(null);
  });
  return {
    node,
    update(rounds, now) {
      const key = (round) => `${round.fragment}/${round.cycle}`;
      keyed(list, rounds, key, makeRound, (row, round) => updateRound(row, round, now, only()));
      show(empty, rounds.length === 0);
      text(empty, nothing);
    },
    fail(line) {
      show(empty, true);
      text(empty, line);
    },
  };
}

function makeRound() {
  const outcome = h("p", { class: "signed outcome" }, sign("pending"), h("b"));
  const marks = h(
    "div", { class: "marks", "aria-hidden": "true" },
    h("i", { class: "mark mark-quorum" }), h("i", { class: "mark mark-closed" }),
  );
  const rows = h("ul", { class: "rows", "aria-label": "Learners in this round" });
  const axis = h("div", { class: "axis", "aria-hidden": "true" });
  const node = h(
    "li", { class: "round card" }, h("div", { class: "round-head" }, h("h3"), outcome, h("p", { class: "muted" })),
    h("p", { class: "reason" }), h("div", { class: "gantt" }, rows, marks, axis), h("p", { class: "hint" }),
  );
  node.steady = roving(rows, ".track");
  return node;
}

function updateRound(node, round, now, only) {
  const goesOn = round.outcome === "open" || round.outcome === "merging";
  const drawn = goesOn ? "" : only + JSON.stringify(round);
  if (drawn !== "" && drawn === node.drawn) return; // a finished round is drawn again only after a change
  node.drawn = drawn;
  const [head, reason, gantt, more] = node.children;
  const [title, outcome, times] = head.children;
  const [rows, marks, axis] = gantt.children;
  const end = endOf(round, now);
  const part = (at) => {
    const share = (at - round.opened_at) / (end - round.opened_at);
    return `${(100 * Math.max(0, Math.min(1, share))).toFixed(2)}%`;
  };
  set(node, "data-outcome", round.outcome);
  text(title, `Fragment ${round.fragment}, cycle ${round.cycle}`);
  setSign(outcome.firstChild, SIGNS[round.outcome]);
  text(outcome.lastChild, round.outcome === "merged" ? `merged as version ${round.version ?? "?"}` : round.outcome);
  text(times, [`opened ${moment(round.opened_at, true)}`, ...milestones(round)].join(", "));
  text(reason, clipped(round.reason, 200));
  [round.quorum_at, round.closed_at].forEach((at, n) => {
    show(marks.children[n], at !== null);
    if (at !== null) marks.children[n].style.left = part(at);
  });
  const all = only === "" ? slowestFirst(round.answers) : round.answers.filter((each) => each.learner === only);
  const shown = all.slice(0, MOST_ROWS);
  keyed(rows, shown, (answer) => answer.learner, makeRow, (row, answer) => updateRow(row, round, answer, end, part));
  node.steady();
  drawAxis(axis, end - round.opened_at);
  const left = all.length - shown.length + (only === "" ? round.more_answers : 0);
  show(more, left > 0 || shown.length === 0);
  const silent = goesOn ? "No learner has answered yet." : "No learner answered.";
  const none = only === "" ? silent : `${only} did not take part in this round.`;
  text(more, left > 0 ? `The slowest learners are shown. ${count(left)} more have answered.` : none);
}

function makeRow(answer) {
  const name = h("a", { href: learnerLink(answer.learner) }, answer.learner);
  return h("li", null, name, h("div", { class: "track", role: "img", tabindex: -1 }), h("span", { class: "note" }));
}

function updateRow(row, round, answer, end, part) {
  const [, track, note] = row.children;
  const phases = phasesOf(round, answer, end);
  set(track, "aria-label", `${answer.learner}: ${story(round, answer, end)}`);
  set(track, "class", answer.declined ? "track declined" : "track");
  keyed(track, phases, (each) => each.phase, (each) => h("span", { class: `seg seg-${each.phase}` }), (bar, each) => {
    bar.style.left = part(each.from);
    bar.style.right = `calc(100% - ${part(each.to)})`;
  });
  text(note, standing(round, answer));
}

function drawAxis(axis, length) {
  const step = niceStep(length, 6);
  const ticks = Array.from({ length: Math.floor(length / step + 1e-6) + 1 }, (_, n) => n * step);
  keyed(axis, ticks, String, () => h("span"), (tick, at) => {
    tick.style.left = `${((100 * at) / length).toFixed(2)}%`;
    text(tick, `${Number(at.toPrecision(3))} s`);
  });
}
