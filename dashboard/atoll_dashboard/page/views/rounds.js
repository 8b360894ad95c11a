// The rounds view: a timeline per round, newest first.

import { get } from "../api.js";
import { h } from "../dom.js";
import { search } from "../fields.js";
import { poller } from "../poll.js";
import { keepQuery } from "../router.js";
import { timeline, timelineKey } from "../timeline.js";

const EVERY_MS = 2000;
const STEP = 20;
const MOST = 200;

export function roundsView(section) {
  let learner = "";
  let last = STEP;
  let feed = null;
  const rounds = timeline({ only: () => learner, nothing: "No round yet." });
  const named = search("Learner's name", (words) => {
    learner = words;
    keepQuery("rounds", { learner });
    page.again();
  });
  const more = h("button", { type: "button", onclick: () => {
    last = Math.min(MOST, last + STEP);
    page.again();
  } }, "More rounds");
  section.append(
    h("div", { class: "filters" }, named.node, timelineKey()), rounds.node, h("div", { class: "pager" }, more),
  );
  const page = poller((signal) => get(["rounds"], { last, learner }, signal), (answer) => {
    rounds.update(answer, feed?.coreNow() ?? Date.now() / 1000);
    more.disabled = answer.length < last || last === MOST;
  }, (error) => rounds.fail(error.message), EVERY_MS);
  return {
    arrive({ query }) {
      learner = query.learner ?? "";
      named.set(learner);
      page.start();
    },
    leave: () => page.stop(),
    update(current) {
      feed = current;
    },
    refresh: () => page.again(),
  };
}
