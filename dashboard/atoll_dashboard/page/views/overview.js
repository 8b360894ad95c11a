// The overview: map, problems, goodput, cost, open rounds, and operator actions.

import { makePicture } from "../region_map.js";
import { get } from "../api.js";
import { lineChart } from "../charts.js";
import { h, keyed, set, setSign, show, sign, swap, text } from "../dom.js";
import {
  about, bytes, clipped, count, decimal, money, percent, plural, rate, ratio, short, span, UNKNOWN,
} from "../format.js";
import { lostBar } from "../lost_time.js";
import { poller } from "../poll.js";
import { figures, linked, makeTable, signed, words } from "../table.js";
import { problems, problemSign } from "../health.js";
import { regionLink, regionName, restoredWords, stateWords } from "../labels.js";
import * as dialogs from "../action_dialogs.js";

const HISTORY_MS = 5000;

export function card(title, ...children) {
  return h("article", { class: "card" }, h("h3", null, title), ...children);
}

export function overviewView(section, actions) {
  const picture = makePicture();
  const lost = lostBar();
  const goodput = h("p", { class: "big" }, h("b"), h("span"));
  const wrong = h("ul", { class: "problems" });
  const wrongCard = card("Problems", wrong);
  const wan = makeWan();
  const waits = h("ul", { class: "waits" });
  const pause = actions.button("Pause the run", dialogs.pause);
  const resume = actions.button("Resume the run", dialogs.resume);
  const choices = h("p", { class: "choices" }, pause, resume);
  const operator = card("Operator actions", choices, actions.problemLine(), actionsElsewhere());
  const charts = {
    tokens: lineChart({ title: "Tokens/s", series: [{ name: "Tokens/s", kind: "a" }], show: short, zero: true }),
    loss: lineChart({ title: "Loss", series: [{ name: "Loss", kind: "a" }], show: (value) => decimal(value, 3) }),
    wan: lineChart({
      title: "WAN rate", series: [{ name: "up", kind: "a" }, { name: "down", kind: "b" }], show: rate, zero: true,
    }),
    goodput: lineChart({ title: "Goodput", series: [{ name: "Goodput", kind: "a" }], show: ratio }),
  };
  const regions = regionTable();
  const links = linkTable();
  const datasets = datasetTable();
  const datasetCard = card("Datasets", datasets.node);
  const ofRun = h("dl", { class: "facts" });
  section.append(
    h(
      "div", { class: "overview" },
      h(
        "div", { class: "main-side" },
        h("article", { class: "card picture-card" }, h("h3", null, "Regions and learners"), picture.node),
        h("div", { class: "charts" }, ...Object.values(charts).map((chart) => h("div", { class: "card" }, chart.node))),
      ),
      h(
        "div", { class: "side" }, wrongCard, card("Open rounds", waits),
        card("Goodput", goodput, lost.node), card("WAN", wan.node), operator,
      ),
    ),
    card("Regions", regions.node),
    card("Fronts and links", links.node),
    datasetCard,
    card("The run", ofRun),
  );
  const history = poller((signal) => get(["history"], {}, signal), drawHistory, () => {}, HISTORY_MS);

  function drawHistory(seen) {
    charts.tokens.update(seen, [seen.tokens_per_s]);
    charts.loss.update(seen, [seen.loss]);
    charts.wan.update(seen, [seen.up_bytes_per_s, seen.down_bytes_per_s]);
    charts.goodput.update(seen, [seen.goodput]);
  }

  function update(feed) {
    const { run } = feed.now;
    picture.update(feed);
    const found = problems(feed);
    show(wrongCard, found.length > 0);
    keyed(wrong, found, (each) => each.key, makeProblem, updateProblem);
    const { goodput: good } = run;
    text(goodput.firstChild, ratio(good.ratio));
    const recent = good.recent === null ? "" : `; ${ratio(good.recent)} in the last five minutes`;
    text(goodput.lastChild, ` of ${span(good.provisioned_s)} provisioned learner time was useful${recent}`);
    lost.update(good.useful_s, good.provisioned_s, good.lost_s);
    wan.update(run);
    updateWaits(waits, feed);
    swap(pause, resume, run.paused === "");
    regions.update(feed.now.regions, "No learner has joined yet.");
    links.update(linksOf(feed.now.regions), "No front or learner has connected yet.");
    show(datasetCard, run.datasets.length > 0);
    datasets.update(run.datasets, "");
    updateFacts(ofRun, facts(run));
  }

  return { arrive: () => history.start(), leave: () => history.stop(), update, refresh: () => history.again() };
}

function makeProblem() {
  return h("li", null, sign("silent"), h("a"));
}

function updateProblem(row, each) {
  set(row, "data-level", each.level);
  setSign(row.firstChild, problemSign(each));
  set(row.lastChild, "href", each.link);
  text(row.lastChild, each.words);
}

function updateWaits(list, feed) {
  const open = feed.now.rounds.filter((round) => round.outcome === "open" || round.outcome === "merging");
  const make = () => h("li", null, h("b"), h("span", { class: "muted" }), h("p"));
  const key = (round) => `${round.fragment}/${round.cycle}`;
  keyed(list, open.length > 0 ? open : [null], (round) => (round ? key(round) : ""), make, (row, round) => {
    const [title, long, why] = row.children;
    text(title, round ? `Fragment ${round.fragment}` : "");
    text(long, round ? ` · open for ${span(feed.coreNow() - round.opened_at)}` : "");
    const reason = round?.reason || "merging";
    const none = feed.now.run.paused ? "No round is open: the run is paused." : "No round is open.";
    text(why, round ? clipped(reason, 120) : none);
    set(why, "title", round && reason.length > 120 ? reason.slice(0, 2000) : null);
  });
}

function makeWan() {
  const facts = h("dl", { class: "facts tight" });
  const used = h("i");
  const bar = h("div", { class: "budget", role: "img" }, used);
  const line = h("p", { class: "hint" });
  const node = h("div", null, facts, bar, line);
  return {
    node,
    update({ wire, cost }) {
      updateFacts(facts, [
        ["Up", `${rate(wire.up_bytes_per_s)}, ${bytes(wire.up_bytes)} so far`],
        ["Down", `${rate(wire.down_bytes_per_s)}, ${bytes(wire.down_bytes)} so far`],
        ["Whole fragments", `${bytes(wire.whole_bytes)} so far`],
        ["Cost", `${money(cost.total)} so far, ${money(cost.per_day)} per day`],
        ["Price", `${money(cost.price_per_gb, true)} per GB, up and down`],
      ]);
      const { budget_gb: budget, gb_per_month: month } = cost;
      const known = `${decimal(month, 0)} GB per month at the rate of the last hour`;
      const soon = `Rates per day and month need 10 minutes of data, and are shown in ${about(cost.known_in_s)}`;
      const at = month === null ? soon : known;
      show(bar, budget !== null && budget > 0);
      if (budget === null) return text(line, `${at}. No budget is set.`);
      used.style.width = `${Math.min(100, (100 * (month ?? 0)) / budget)}%`;
      bar.classList.toggle("over", month > budget);
      set(bar, "aria-label", `${percent(month, budget)} of the month's budget`);
      const share = month === null ? ". The budget is" : `, ${percent(month, budget)} of the budget of`;
      return text(line, `${at}${share} ${decimal(budget, 0)} GB.`);
    },
  };
}

export function updateFacts(list, rows) {
  const make = ([title]) => h("div", null, h("dt", null, title), h("dd"));
  keyed(list, rows, (row) => row[0], make, (node, row) => text(node.lastChild, row[1]));
}

function facts(run) {
  const sums = run.contributions;
  return [
    ["Parameters", `${short(run.parameters)} in ${plural(run.fragments, "fragment")}`],
    ["Inner steps between syncs (H)", count(run.inner_steps)],
    ["Overlap (tau)", `${decimal(run.overlap_steps, 1)} steps`],
    ["Codec", run.codec],
    ["Bits per parameter", `${decimal(run.wire.up_bits, 2)} up, ${decimal(run.wire.down_bits, 2)} down`],
    ["Merges", count(run.merges)],
    ["Tokens", `${short(run.tokens_trained)}${run.total_tokens ? ` of ${short(run.total_tokens)}` : ""} trained, `
      + `${percent(run.tokens_merged, run.tokens_trained)} merged`],
    ["Contributions", `${count(sums.accepted)} accepted: ${count(sums.merged)} merged, ${count(sums.pending)} pending, `
      + `${count(sums.refused)} refused; ${count(sums.turned_away)} turned away`],
    ["Core", `generation ${run.generation}${run.restored === null ? "" : ` (${restoredWords(run.restored)})`}, `
      + `epoch ${run.epoch}, up for ${span(run.uptime_s)}`],
    ["Run", `${span(run.wall_s)} since the first learner joined; this dashboard started ${span(run.dashboard_s)} ago`],
  ];
}

function regionTable() {
  return makeTable({
    caption: "Regions",
    key: (region) => region.region,
    columns: [
      linked("Region", (region) => regionName(region.region), (region) => regionLink(region.region)),
      words("Learners", (region) => stateWords(region.learners)),
      figures("Goodput", (region) => ratio(region.goodput)),
      figures("Tokens/s", (region) => short(region.tokens_per_s)),
      figures("Up", (region) => rate(region.up_bytes_per_s)),
      figures("Down", (region) => rate(region.down_bytes_per_s)),
      figures("Up so far", (region) => bytes(region.up_bytes), { minor: true }),
      figures("Down so far", (region) => bytes(region.down_bytes), { minor: true }),
      figures("Cost so far", (region) => money(region.cost)),
    ],
  });
}

/** All links with their regions. Silent links come first. */
function linksOf(regions) {
  const all = regions.flatMap(({ region, links }) => links.map((link) => ({ ...link, region })));
  return all.sort((one, other) => (other.state === "silent") - (one.state === "silent"));
}

const LINK_SIGNS = { connected: "live", silent: "cut_off" };
const ago = (seconds) => (seconds === null ? UNKNOWN : `${span(seconds)} ago`);

function linkTable() {
  return makeTable({
    caption: "Fronts and links",
    key: (link) => `${link.front} ${link.name}`,
    columns: [
      words("Link", (link) => (link.front ? `front ${link.name}` : link.name)),
      linked("Region", (link) => regionName(link.region), (link) => regionLink(link.region)),
      signed("State", (link) => LINK_SIGNS[link.state] ?? "left", { label: (link) => link.state }),
      figures("Last message", (link) => ago(link.heard_age_s)),
      figures("Round trip", (link) => (link.round_trip_s === null ? UNKNOWN : `${count(1000 * link.round_trip_s)} ms`)),
      figures("Last byte", (link) => ago(link.byte_age_s)),
      figures("Up", (link) => rate(link.up_bytes_per_s)),
      figures("Down", (link) => rate(link.down_bytes_per_s)),
      learnersBehind(),
      figures("Outage budget", (link) => (link.budget_s === null ? "no limit" : span(link.budget_s))),
    ],
  });
}

/** A column with the number of learners behind a link. It opens to their names. */
function learnersBehind() {
  return {
    title: "Learners",
    number: true,
    make: (cell) => cell.append(h("details", { class: "behind" }, h("summary"), h("p"))),
    show(cell, { name, learners, learner_names: names }) {
      const [summary, list] = cell.firstChild.children;
      const more = learners > names.length ? `, and ${count(learners - names.length)} more` : "";
      const words_ = names.length > 0 ? `${names.join(", ")}${more}` : "none";
      text(summary, count(learners));
      set(summary, "aria-label", `${plural(learners, "learner")} behind ${name}`);
      set(summary, "title", words_);
      text(list, words_);
    },
  };
}

function datasetTable() {
  const whole = (each) => each.units * each.epochs;
  return makeTable({
    caption: "Datasets",
    key: (each) => each.name,
    columns: [
      words("Dataset", (each) => each.name),
      figures("Epoch", (each) => `${Math.min(each.epoch + 1, each.epochs)} of ${each.epochs}`),
      figures("Units consumed", (each) => `${count(each.consumed)} of ${count(whole(each))}`),
      figures("Share", (each) => percent(each.consumed, whole(each))),
      figures("Leased", (each) => count(each.leased)),
      figures("Returned", (each) => count(each.returned)),
      figures("Repeated", (each) => decimal(each.repeated, 1)),
      figures("Lost", (each) => decimal(each.lost, 1)),
    ],
  });
}

function actionsElsewhere() {
  const to = (href, words_) => h("a", { href }, words_);
  return h(
    "p", { class: "hint" }, "To evict a learner, open its page from ", to("#learners", "Learners"),
    ". To take a checkpoint or download the model, open ", to("#checkpoints", "Checkpoints"), ".",
  );
}
