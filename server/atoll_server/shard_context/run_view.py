"""PURE: a shard's view of the run beyond its own fragments, as last sent by the registrar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunView:
    """The view of the run that the registrar sends to each shard after a change. A shard keeps the newest view.

    epoch: the registrar's epoch. sequence: number that increases with each view in an epoch. run_tokens: tokens trained
    by all learners so far, excluding voided_tokens. voided_tokens: tokens that operators voided or restores discarded.
    paused: the operator and the reason; empty while the run is not paused. slot: position in the run's cycle of slots
    when the view was made. slot_s: seconds per slot; 0 if no learner trains, or the run has one shard.
    """

    epoch: int = 0
    sequence: int = 0
    run_tokens: int = 0
    voided_tokens: int = 0
    paused: str = ""
    slot: float = 0.0
    slot_s: float = 0.0

    def newer_than(self, other: RunView) -> bool:
        """Returns whether this view is newer. Compares epoch and sequence, not tokens, which an operator may reduce."""
        return (self.epoch, self.sequence) > (other.epoch, other.sequence)
