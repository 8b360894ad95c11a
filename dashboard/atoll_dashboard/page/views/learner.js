// The view of one learner: figures, lost time, rounds, receipts, and the buttons to evict or readmit it.

import { get } from "../api.js";
import { lineChart } from "../charts.js";
import { h, setSign, show, sign, swap, text } from "../dom.js";
import { bytes, clipped, count, decimal, moment, percent, ratio, short, span } from "../format.js";
import { lostBar } from "../lost_time.js";
import { poller } from "../poll.js";
import { receiptColumns } from "../receipts.js";
import { makeTable } from "../table.js";
import { timeline } from "../timeline.js";
import { regionName, stateWord } from "../labels.js";
import * as dialogs from "../action_dialogs.js";
import { card, updateFacts } from "./overview.js";

const EVERY_MS = 2000;
const SLOW_MS = 5000;
const ROUNDS = 6;
const RECEIPTS = 10;

export function learnerView(section, actions) {
  let name = "";
  let state = "";
  let feed = null;
  const title = section.querySelector("h2");
  const standing = h("p", { class: "standing" }, sign("pending"), h("b"), h("span"));
  const failed = h("p", { class: "wrong", role: "alert" });
  const evict = actions.button("Evict", () => dialogs.evict(name), "danger");
  const readmit = actions.button("Readmit", () => dialogs.readmit(name));
  const facts = h("dl", { class: "facts" });
  const good = h("p", { class: "big" }, h("b"), h("span"));
  const lost = lostBar();
  const loss = lineChart({ title: "Loss", series: [{ name: "Loss", kind: "a" }], show: (value) => decimal(value, 3) });
  const tokens = lineChart({ title: "Tokens/s", series: [{ name: "Tokens/s", kind: "a" }], show: short, zero: true });
  const rounds = timeline({ only: () => name, nothing: "This learner has not been in any recent round." });
  const receipts = makeTable({
    caption: "Newest receipts", columns: receiptColumns(false), key: (receipt) => `${receipt.shard}:${receipt.number}`,
    stacked: true,
  });
  const all = h("a");
  const body = h(
    "div", { hidden: true },
    h("div", { class: "bar" }, standing, h("p", { class: "choices" }, evict, readmit)), actions.problemLine(),
    h("div", { class: "pair" }, card("Figures", facts), card("Goodput", good, lost.node)),
    h("div", { class: "charts" }, h("div", { class: "card" }, loss.node), h("div", { class: "card" }, tokens.node)),
    card("Rounds", rounds.node), card("Receipts", receipts.node, h("p", { class: "after" }, all)),
  );
  section.append(h("p", { class: "back" }, h("a", { href: "#learners" }, "All learners")), failed, body);

  const polls = [
    poller((signal) => get(["learners", name], {}, signal), showLearner, fail, EVERY_MS),
    poller((signal) => get(["learners", name, "history"], {}, signal), showHistory, () => {}, SLOW_MS),
    poller((signal) => get(["rounds"], { learner: name, last: ROUNDS }, signal), showRounds, () => {}, EVERY_MS),
    poller((signal) => get(["receipts"], { learner: name, limit: RECEIPTS }, signal), showReceipts, () => {}, SLOW_MS),
  ];

  function fail(error) {
    text(failed, error.message);
  }

  function showLearner(learner) {
    text(failed, "");
    show(body, true);
    state = learner.state;
    setSign(standing.firstChild, state);
    text(standing.children[1], stateWord(state));
    const since = learner.since === null ? "" : ` since ${moment(learner.since)}`;
    const waits = learner.waiting_for ? `; rounds wait for ${clipped(learner.waiting_for, 90)}` : "";
    text(standing.lastChild, `${since}; last message ${span(learner.last_seen_age_s)} ago${waits}`);
    swap(evict, readmit, state !== "evicted");
    updateFacts(facts, factsOf(learner));
    text(good.firstChild, ratio(learner.goodput));
    text(good.lastChild, ` of ${span(learner.provisioned_s)} provisioned; ${span(learner.lost_total_s)} lost`);
    const useful = Math.max(0, learner.provisioned_s - learner.lost_total_s);
    lost.update(useful, learner.provisioned_s, learner.lost_s);
  }

  function showHistory(history) {
    loss.update(history, [history.loss]);
    tokens.update(history, [history.tokens_per_s]);
  }

  function showRounds(answer) {
    rounds.update(answer, feed?.coreNow() ?? Date.now() / 1000);
  }

  function showReceipts(answer) {
    receipts.update(answer.items, "No receipt yet.");
  }

  return {
    arrive(place) {
      if (place.name !== name) {
        name = place.name;
        show(body, false);
        text(failed, "");
        text(title, name);
        text(evict, `Evict ${name}`);
        text(readmit, `Readmit ${name}`);
        text(all, `All receipts of ${name}`);
        all.href = `#receipts?learner=${encodeURIComponent(name)}`;
      }
      for (const poll of polls) poll.start();
    },
    leave() {
      for (const poll of polls) poll.stop();
    },
    update(current) {
      feed = current;
    },
    refresh() {
      for (const poll of polls) poll.again();
    },
  };
}

function factsOf(learner) {
  return [
    ["Region", regionName(learner.region)],
    ["Incarnation", count(learner.incarnation)],
    ["Inner steps", count(learner.steps)],
    ["Seconds per step", decimal(learner.step_time_s, 3)],
    ["Tokens", short(learner.tokens)],
    ["Tokens/s", short(learner.tokens_per_s)],
    ["Loss", decimal(learner.loss, 3)],
    ["Blocked in step()", percent(learner.blocked_fraction, 1)],
    ["Pending contributions", count(learner.pending)],
    ["Up", bytes(learner.up_bytes)],
    ["Down", bytes(learner.down_bytes)],
  ];
}
