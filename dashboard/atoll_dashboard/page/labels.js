// The labels of states, causes, fates and kinds, in the order of all views.

import { count, moment } from "./format.js";

export const STATES = ["live", "paused", "joining", "silent", "cut_off", "left", "evicted"];
export const CAUSES = ["down", "restarting", "joining", "blocked", "thrown_away", "other"];
export const FATES = ["pending", "merged", "refused"];
export const KINDS = [
  "core", "joined", "back", "silent", "left", "evicted", "refused", "checkpoint", "paused", "resumed", "trouble",
  "unreachable", "reachable",
];

const CAUSE_WORDS = {
  down: "down",
  restarting: "restarting",
  joining: "joining",
  blocked: "blocked in step()",
  thrown_away: "work thrown away",
  other: "other",
};

/** The label of a cause. For a cause that this page does not know, the label is the name from the core. */
export function causeWords(cause) {
  return CAUSE_WORDS[cause] ?? cause.replaceAll("_", " ");
}

/** Example: "cut off" for cut_off. */
export const stateWord = (state) => state.replaceAll("_", " ");

/** Example: "3 live, 1 silent". */
export function stateWords(learners) {
  const parts = STATES.filter((state) => learners[state] > 0).map((state) => `${learners[state]} ${stateWord(state)}`);
  return parts.join(", ") || "no learners";
}

/** The learners of which the core hears nothing. */
export const unheard = (learners) => (learners.silent ?? 0) + (learners.cut_off ?? 0);

export function total(learners) {
  return STATES.reduce((sum, state) => sum + (learners[state] ?? 0), 0);
}

const KIND_SIGNS = {
  core: "core", joined: "joining", back: "live", silent: "silent", left: "left", evicted: "evicted",
  refused: "refused", checkpoint: "checkpoint", paused: "paused", resumed: "live", trouble: "silent", unreachable: "silent",
  reachable: "live",
};

export function kindSign(kind) {
  return KIND_SIGNS[kind] ?? "left";
}

export const learnerLink = (name) => `#learner/${encodeURIComponent(name)}`;
export const regionName = (region) => region || "no region";
export const regionLink = (region) => (region ? `#learners?region=${encodeURIComponent(region)}` : "#learners");

/** What a restore did, as `atoll status` says it. */
export function restoredWords({ checkpoint, backup_at: backup, undone_tokens: undone }) {
  const source = backup === null ? `to checkpoint ${checkpoint}` : `from the backup of ${moment(backup)}`;
  return `restored ${source}${undone ? `: ${count(undone)} trained tokens no longer count` : ""}`;
}
