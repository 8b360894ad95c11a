// The learners view: a table that the server sorts, filters and divides into pages.

import { get } from "../api.js";
import { h, set } from "../dom.js";
import { choice, search } from "../fields.js";
import { clipped, count, decimal, ratio, short, span } from "../format.js";
import { poller } from "../poll.js";
import { keepQuery } from "../router.js";
import { figures, linked, makePager, makeTable, signed, words } from "../table.js";
import { learnerLink, regionLink, regionName, STATES, stateWord } from "../labels.js";

const LIMIT = 50;
const EVERY_MS = 2000;
// Columns that sort in descending order first.
const DOWNWARD = ["steps", "tokens_per_s", "loss", "lost", "heard"];

const columns = [
  linked("Learner", (each) => each.learner, (each) => learnerLink(each.learner), { sort: "learner" }),
  signed("State", (each) => each.state, { sort: "state" }),
  linked("Region", (each) => regionName(each.region), (each) => regionLink(each.region), { sort: "region" }),
  figures("Goodput", (each) => ratio(each.goodput), { sort: "goodput" }),
  figures("Lost", (each) => span(each.lost_total_s), { sort: "lost" }),
  figures("Tokens/s", (each) => short(each.tokens_per_s), { sort: "tokens_per_s" }),
  figures("Loss", (each) => decimal(each.loss, 3), { sort: "loss" }),
  figures("Steps", (each) => count(each.steps), { sort: "steps", minor: true }),
  figures("Tokens", (each) => short(each.tokens), { minor: true }),
  figures("Last message", (each) => `${span(each.last_seen_age_s)} ago`, { sort: "heard" }),
  words("Rounds wait for", (each) => clipped(each.waiting_for, 80), { minor: true, wide: true }),
];

export function learnersView(section) {
  let asked = { region: "", state: "", search: "", sort: "trouble", descending: false, offset: 0 };
  const regions = choice("Region", "All regions", [], (region) => change({ region, offset: 0 }));
  const states = choice("State", "All states", STATES, (state) => change({ state, offset: 0 }), stateWord);
  const named = search("Search learners", (words_) => change({ search: words_, offset: 0 }));
  const trouble = h("button", { type: "button", onclick: () => sortBy("trouble") }, "Trouble first");
  const table = makeTable({ caption: "Learners", columns, key: (each) => each.learner, onsort: sortBy });
  const pager = makePager("learners", LIMIT, (offset) => change({ offset }));
  section.append(
    h("div", { class: "filters" }, regions.node, states.node, named.node, trouble), table.node, pager.node,
  );
  const page = poller((signal) => get(["learners"], { ...asked, limit: LIMIT }, signal), (answer) => {
    table.update(answer.items, "No matching learners.");
    pager.update(answer);
  }, (error) => table.fail(error.message), EVERY_MS);

  function sortBy(sort) {
    const descending = sort === asked.sort ? !asked.descending : DOWNWARD.includes(sort);
    change({ sort, descending: sort === "trouble" ? false : descending, offset: 0 });
  }

  function change(part) {
    asked = { ...asked, ...part };
    const { offset, sort, descending, ...filter } = asked;
    keepQuery("learners", {
      ...filter, sort: sort === "trouble" ? "" : sort, descending: descending || "", offset: offset || "",
    });
    showAsked();
    page.again();
  }

  function showAsked() {
    regions.set(asked.region);
    states.set(asked.state);
    named.set(asked.search);
    table.showSort({ by: asked.sort, descending: asked.descending });
    set(trouble, "aria-pressed", String(asked.sort === "trouble"));
  }

  return {
    arrive({ query }) {
      const sort = columns.some((column) => column.sort && column.sort === query.sort) ? query.sort : "trouble";
      asked = {
        region: query.region ?? "", state: STATES.includes(query.state) ? query.state : "",
        search: query.search ?? "", sort, descending: query.descending === "true",
        offset: Math.max(0, Number.parseInt(query.offset ?? "0", 10) || 0),
      };
      showAsked();
      page.start();
    },
    leave: () => page.stop(),
    update: (feed) => regions.options(feed.now.regions.map((region) => region.region).filter(Boolean)),
    refresh: () => page.again(),
  };
}
