// PURE: the phases of a round, per learner and as text.

import { decimal, exact } from "./format.js";

export const PHASES = {
  waiting: "waiting",
  upload: "upload",
  held: "held",
  merge: "merge",
  publish: "publish",
  adoption: "adoption",
};

/** The end of a round's time axis: the last known time of the round, or the current time if the round is open. */
export function endOf(round, now) {
  const times = [round.quorum_at, round.closed_at, round.merged_at, round.published_at];
  for (const answer of round.answers) times.push(answer.began_at, answer.durable_at, answer.adopted_at);
  if (round.outcome === "open" || round.outcome === "merging") times.push(now);
  const last = Math.max(...times.filter((time) => time !== null), round.opened_at);
  return Math.max(last, round.opened_at + 0.01);
}

/** [{phase, from, to}] of one learner in a round. */
export function phasesOf(round, answer, end) {
  const { opened_at: opened, closed_at: closed, merged_at: merged, published_at: published } = round;
  const { began_at: began, durable_at: durable, adopted_at: adopted } = answer;
  const parts = [];
  const add = (phase, from, to) => {
    if (from !== null && to > from) parts.push({ phase, from, to });
  };
  if (!answer.declined) {
    add("waiting", opened, began ?? closed ?? end);
    add("upload", began === null ? null : Math.max(began, opened), durable ?? end);
    const inTime = durable !== null && (closed === null || durable <= closed);
    if (inTime) {
      add("held", durable, closed ?? end);
      if (round.outcome !== "lapsed") {
        add("merge", closed, merged ?? end);
        add("publish", merged, published ?? end);
      }
    }
  }
  if (adopted !== null) add("adoption", published, adopted);
  return parts;
}

/** The state of a learner's answer, as a short text. */
export function standing(round, answer) {
  if (answer.declined) return "declined";
  const over = round.closed_at;
  if (answer.began_at === null) return over === null ? "not answered yet" : "no answer";
  if (answer.durable_at === null) return over === null ? "uploading" : "still uploading";
  if (over !== null && answer.durable_at > over) return `${exact(answer.durable_at - over)} too late`;
  return `${answer.late ? "late, " : ""}${exact(answer.durable_at - round.opened_at)}`;
}

/** All phases of a learner's answer, as text. */
export function story(round, answer, end) {
  const parts = [];
  if (answer.declined) parts.push(`declined: ${answer.declined}`);
  for (const { phase, from, to } of phasesOf(round, answer, end)) parts.push(`${PHASES[phase]} ${exact(to - from)}`);
  if (!answer.declined && answer.durable_at === null) parts.push(standing(round, answer));
  if (answer.late) parts.push("late");
  if (answer.staleness !== null) parts.push(`staleness ${decimal(answer.staleness, 2)}`);
  if (answer.weight !== null) parts.push(`weight ${decimal(answer.weight, 3)}`);
  if (round.published_at !== null && answer.adopted_at === null) parts.push("not adopted yet");
  return parts.join(", ");
}

/** Sorts answers: the slowest come first, and those that declined come last. */
export function slowestFirst(answers) {
  const rank = (answer) => (answer.declined ? -1 : answer.durable_at === null ? Infinity : answer.durable_at);
  return [...answers].sort((one, other) => {
    const [a, b] = [rank(one), rank(other)];
    return a === b ? (one.learner < other.learner ? -1 : 1) : b > a ? 1 : -1;
  });
}

/** "opened 12:00:01.2, quorum after 3.10 s, closed after 4.00 s, ..." */
export function milestones(round) {
  const after = (word, at) => (at === null ? "" : `${word} after ${exact(at - round.opened_at)}`);
  return [
    after("quorum", round.quorum_at), after(round.outcome === "lapsed" ? "lapsed" : "closed", round.closed_at),
    after("merged", round.merged_at), after("published", round.published_at),
  ].filter(Boolean);
}
