"""PURE: records which units of a lease are in the merged work of one fragment."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Limits on what a fragment keeps, because a hostile learner chooses leases and gaps freely. Honest learners stay below.
MAX_LEASES = 64  # leases kept per process: those of its newest merged contributions
MAX_RUNS = 256  # runs kept per lease: the newest ones


@dataclass(frozen=True, slots=True)
class UnitRange:
    """The units of a lease that were fully trained within a contribution's steps: ordinals `after` + 1 to `upto`."""

    lease: int
    after: int
    upto: int


@dataclass(frozen=True, slots=True)
class MergedUnits:
    """The units of one lease whose work is merged into one fragment.

    through: ordinal up to which the fragment's work on units is decided, because it was merged or the learner dropped
    it. runs: (first, last) ordinals of merged units in ascending order, with gaps between them; at most MAX_RUNS.
    """

    through: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    def plus(self, merged: UnitRange) -> MergedUnits:
        """Returns these units together with those of one more merged contribution.

        A learner's contributions to a fragment contain disjoint ranges of steps, in order. Units up to `through`
        therefore cannot be merged again, regardless of what a learner declares.
        """
        first, last = max(merged.after, self.through) + 1, merged.upto
        through = max(self.through, merged.after, merged.upto)
        if first > last:
            return MergedUnits(through, self.runs)
        if self.runs and self.runs[-1][1] + 1 == first:
            return MergedUnits(through, (*self.runs[:-1], (self.runs[-1][0], last)))
        return MergedUnits(through, (*self.runs, (first, last))[-MAX_RUNS:])

    def contains(self, ordinal: int) -> bool:
        """Returns whether the merged work contains a unit's last step."""
        place = bisect_left(self.runs, (ordinal + 1,)) - 1
        return place >= 0 and ordinal <= self.runs[place][1]

    def as_data(self) -> list[Any]:
        """Returns JSON values."""
        return [self.through, [list(run) for run in self.runs]]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> MergedUnits:
        through, runs = data
        return cls(through, tuple((first, last) for first, last in runs))


def with_merged(known: Mapping[int, MergedUnits], merged: Iterable[UnitRange]) -> dict[int, MergedUnits]:
    """Returns a process's merged units of one fragment, keyed by lease, after adding one more merged contribution.

    The result contains at most MAX_LEASES leases. Those of the newest contributions come last.
    """
    added = {each.lease: known.get(each.lease, MergedUnits()).plus(each) for each in merged}
    kept = [*(each for each in known.items() if each[0] not in added), *added.items()]
    return dict(kept[-MAX_LEASES:])
