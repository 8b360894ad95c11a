"""PURE: decides when a run's shards open their rounds, so that a learner's peak transfer rate equals its mean rate.

A run has one slot per fragment. The slots of one cycle are evenly spaced over H inner steps, and each belongs to a
shard. The registrar sends the position in the cycle to all shards. A shard opens its rounds as if it were alone, but
moves each opening to its nearest slot. While the registrar is unavailable, shards continue from the last position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """One shard's slots, in ascending order.

    cycle: number of all slots. most: limit on this shard's rounds in flight.
    """

    cycle: int
    slots: tuple[int, ...]
    most: int

    @classmethod
    def of(cls, counts: Sequence[int], number: int, wanted: int) -> Pacing:
        """Returns the pacing of a shard. counts: number of fragments of each shard. wanted: the run's rounds in flight.

        A shard with n fragments gets n slots, as evenly spaced as the other shards' slots allow.
        """
        order = sorted(((place + 0.5) / count, shard) for shard, count in enumerate(counts) for place in range(count))
        slots = tuple(slot for slot, (_, shard) in enumerate(order) if shard == number)
        cycle = len(order)
        before, upto = sum(counts[:number]), sum(counts[: number + 1])
        share = wanted * upto // cycle - wanted * before // cycle if cycle else 0
        return cls(cycle, slots, max(1, share))


@dataclass(frozen=True, slots=True)
class Position:
    """The run's position in its cycle at one moment. at: monotonic seconds. slot_s: seconds per slot."""

    slot: float
    at: float
    slot_s: float

    def nearest(self, pacing: Pacing, at: float) -> float:
        """Returns the time of the shard's slot that is nearest to `at`, in monotonic seconds."""
        here = (self.slot + (at - self.at) / self.slot_s) % pacing.cycle
        gaps = ((slot - here + pacing.cycle / 2) % pacing.cycle - pacing.cycle / 2 for slot in pacing.slots)
        return at + min(gaps, key=abs, default=0.0) * self.slot_s

    def moved(self, cycle: int, now: float, slot_s: float) -> Position:
        """Returns the position at `now`, which then advances by one slot per `slot_s` seconds."""
        passed = (now - self.at) / self.slot_s if self.slot_s else 0.0
        return Position((self.slot + passed) % cycle, now, slot_s)
