"""PURE: what a shard knows of the run beyond its fragments, as last sent by the registrar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunView:
    """Goes from the registrar to each shard whenever it changes; a shard keeps the newest.

    epoch: of the registrar. sequence: grows with each view of an epoch. run_tokens: trained by all learners so far,
    without voided_tokens, which operators struck or a restored checkpoint left behind. paused: by which operator and
    why; empty while the run goes on.
    """

    epoch: int = 0
    sequence: int = 0
    run_tokens: int = 0
    voided_tokens: int = 0
    paused: str = ""

    def newer_than(self, other: RunView) -> bool:
        """Compares epoch and sequence, not tokens: tokens fall when an operator voids some."""
        return (self.epoch, self.sequence) > (other.epoch, other.sequence)
