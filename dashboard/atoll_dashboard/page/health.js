// The problems of a run as text, with the worst problem first.

import { about, clipped, decimal, moment, plural, ratio } from "./format.js";
import { learnerLink, regionLink, regionName, restoredWords, total, unheard } from "./labels.js";

export const OLD_S = 5;
const RESTORED_S = 3600; // seconds for which a restore is shown as a problem
const LOW_GOODPUT = 0.8; // lower limit on the goodput of the last five minutes

const problem = (level, key, words, link = "#overview") => ({ level, key, words, link });

/** The reason why the displayed data is old, or "" if the data is current. */
export function oldness(feed) {
  const run = feed.now?.run;
  if (feed.brokenAt !== null) return `${feed.why}; the page reconnects automatically`;
  if (run === undefined) return feed.age() > OLD_S ? "the dashboard has sent nothing yet" : "";
  if (!run.reachable) return `the last poll of the core failed${run.problem ? `: ${run.problem}` : ""}`;
  return feed.age() > OLD_S ? "no newer data has arrived" : "";
}

/** [{level: "bad" or "warn", key, words, link}]; empty: healthy. Screen readers announce each new key. */
export function problems(feed) {
  const found = [];
  if (feed.brokenAt !== null) {
    found.push(problem("bad", "stream", `dashboard unreachable since ${moment(feed.brokenAt)}`));
  }
  if (feed.now === null) return found;
  const { run, regions } = feed.now;
  if (!run.reachable) {
    const since = moment(run.at || Date.now() / 1000 - feed.age());
    const what = run.problem.startsWith("no core answers") ? "core unreachable" : "no data from the core";
    found.push(problem("bad", "core", `${what} since ${since}`));
  }
  if (run.paused !== "") found.push(problem("warn", "paused", `paused ${run.paused}`));
  if (run.restored !== null && run.at - run.restored.at < RESTORED_S) {
    found.push(problem("warn", "restored", restoredWords(run.restored)));
  }
  for (const { region, links } of regions) {
    for (const { name, trouble } of links) {
      if (trouble !== "") found.push(problem("bad", `front ${name}`, trouble, regionLink(region)));
    }
  }
  const silent = regions.flatMap((region) => silence(region, feed.coreNow(), run.lost_window_s));
  found.push(...silent.sort((one, other) => other.dead - one.dead || other.longest - one.longest));
  if (run.reachable && total(run.learners) === 0) {
    found.push(problem("warn", "empty", "no learner has joined yet", "#learners"));
  }
  if (run.paused === "" && total(run.learners) > 0 && !run.learners.live) {
    const { joining = 0, paused: resting = 0 } = run.learners;
    const words = resting > 0 ? "all learners are paused" : "all learners have left or been evicted";
    const wrong = joining + unheard(run.learners) > 0;
    found.push(problem(wrong ? "bad" : "warn", "none live", wrong ? "no learner is live" : words, "#learners"));
  }
  for (const trouble of run.troubles) found.push(problem("bad", trouble, clipped(trouble)));
  const { recent } = run.goodput;
  if (recent !== null && recent < LOW_GOODPUT && run.paused === "") {
    found.push(problem("warn", "goodput", `goodput of the last five minutes is ${ratio(recent)}`));
  }
  const { budget_gb: budget, gb_per_month: month } = run.cost;
  if (budget !== null && month > budget) {
    const rate = `the WAN carries ${decimal(month, 0)} GB per month at this rate`;
    found.push(problem("warn", "budget", `${rate}; the budget is ${decimal(budget, 0)} GB`));
  }
  return found.sort((one, other) => rank(one) - rank(other));
}

export function problemSign({ key, level }) {
  return key === "paused" ? "paused" : level === "bad" ? "silent" : "warn";
}

/** A lost connection and a pause come first, because they explain other problems. */
function rank({ key, level }) {
  return ["stream", "core", "paused"].includes(key) ? 0 : level === "bad" ? 1 : 2;
}

/** One problem for all silent learners of a region, or none. window: span of the learners' lost time, in seconds. */
function silence(region, now, window) {
  const silent = region.learners.silent ?? 0;
  if (silent === 0) return [];
  const since = region.dots.filter((dot) => dot.state === "silent");
  const longest = Math.max(0, ...since.map((dot) => (dot.since === null ? 0 : now - dot.since)));
  const here = total(region.learners) - (region.learners.left ?? 0) - (region.learners.evicted ?? 0);
  const dead = silent === here;
  const where = region.region ? `region ${region.region}` : regionName("");
  const long = longest > 0 ? ` for ${about(longest)}` : "";
  let words = `${plural(silent, "learner")} in ${where} silent, the longest${long}`;
  let link = region.region ? `${regionLink(region.region)}&state=silent` : "#learners?state=silent";
  if (dead && silent > 1) words = `${where}: all ${plural(silent, "learner")} silent${long}`;
  else if (silent === 1 && since.length > 0) {
    const past = window > 3500 ? "hour" : about(window);
    words = `learner ${since[0].learner} silent${long}; ${about(since[0].lost_s)} of the last ${past} lost`;
    link = learnerLink(since[0].learner);
  }
  return [{ ...problem("bad", `silent ${region.region} ${silent}`, words, link), dead, longest }];
}
