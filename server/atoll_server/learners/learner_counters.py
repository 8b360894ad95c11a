"""PURE: the counters of a learner's incarnations, and the sums of its contributions at each shard."""

from __future__ import annotations

from dataclasses import dataclass

from atoll_server.learners.plausibility import MaxRates, counted


@dataclass(slots=True)
class IncarnationCounters:
    """Counters of one incarnation, from its latest report."""

    joined_at: float = 0.0
    steps: int = 0
    tokens: int = 0
    stepping_s: float = 0.0
    blocked_s: float = 0.0
    joining_s: float = 0.0
    paused_s: float = 0.0
    abandoned_tokens: float = 0.0
    grown_at: float = 0.0  # time of the last report with new steps; 0: no such report
    steps_paid: float = 0.0  # `paid_until` of plausibility.counted; 0: the same as joined_at
    tokens_paid: float = 0.0  # the same for tokens
    frozen_s: float = 0.0  # time included in the reported stepping_s although the process was frozen
    undone_tokens: float = 0.0  # merged tokens that a restore discarded; weighted like accepted_tokens
    restored_to: int | None = None  # counted tokens at a checkpoint that was restored after the last report
    kept_tokens: float | None = None  # merged tokens at that checkpoint, if it came from a backup
    said_steps: int = 0  # reported steps; `steps` are those that count
    said_tokens: int = 0  # reported tokens; `tokens` are those that count

    def tokens_counted(self, said: int, most: MaxRates, now: float) -> tuple[int, float]:
        """Returns the number of reported tokens that count now, and the new `tokens_paid` (see `plausibility.counted`).

        said: all tokens that the incarnation has reported. now: wall-clock seconds.
        """
        return counted(said, self.tokens, most.tokens_s, self.tokens_paid or self.joined_at, now)

    def given_up_tokens(self) -> float:
        """Returns the number of tokens whose work the learner dropped or a restore discarded."""
        return self.abandoned_tokens + self.undone_tokens

    def thrown_away_s(self, accepted: float | None = None, lost: float | None = None) -> float:
        """Returns the stepping time, in seconds, of tokens that will never be merged.

        accepted: acknowledged tokens of dead incarnations; None for the living incarnation, which may send more tokens.
        lost: tokens of the living incarnation that the learner dropped or that restores discarded.
        """
        tokens = max(self.tokens, self.said_tokens)
        if not tokens:
            return self.stepping_s if accepted is not None else 0.0
        if lost is None:
            lost = self.given_up_tokens()
        lost = max(lost, tokens - accepted if accepted is not None else 0.0)
        return self.stepping_s * min(1.0, max(0.0, lost) / tokens)


@dataclass(slots=True)
class ShardSums:
    """Sums over a learner's contributions at one shard.

    merged_token_parameters: sum of tokens x fragment parameters over merged contributions; an integer, so it is exact.
    bytes_up: payload bytes of acknowledged contributions. parameters_up: number of parameters in these contributions.
    accepted_tokens: acknowledged tokens of the living incarnation, as a mean over the run's fragments. The mean is
    weighted by the number of parameters. accepted_before: the same for dead incarnations. bytes_down, parameters_down,
    bytes_whole: as in TimeAccount. undone_tokens: as in IncarnationCounters. These four sums are 0 for the shard in
    this process.
    """

    merged_token_parameters: int = 0
    bytes_up: int = 0
    parameters_up: int = 0
    accepted_tokens: float = 0.0
    accepted_before: float = 0.0
    bytes_down: int = 0
    parameters_down: int = 0
    bytes_whole: int = 0
    undone_tokens: float = 0.0
