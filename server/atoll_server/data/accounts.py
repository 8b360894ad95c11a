"""PURE: decides which units of a dataset are handed out, consumed, returned and repeated.

Positions number the units of all epochs in the order in which they are handed out. A lease is one process's growing
sequence of positions, and the k-th position has ordinal k. A returned unit stays in the pool until it is handed out
under another lease.

Rules:
- A lease's unit is in the merged work of a fragment if a merged contribution contains the unit's last step. The unit's
  merged part is the number of parameters in all such fragments.
- A unit is decided when its work on every fragment is merged or dropped. After its lease has ended, it is decided when
  none of its work can still be merged (settled). If this takes too long, the unit is decided early (overdue).
- A decided unit is consumed if its merged part is at least half of the parameters. The rest is lost. Otherwise, the
  unit returns to the pool, and its merged part counts as repeated.
- Work on a unit that was decided early may be merged later. Such work reduces the lost part of a consumed unit and
  adds to the repeated part of a returned unit.

At any time, in parameters: merged parts of all units = consumed units x parameters + repeated - lost + merged parts of
undecided units.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from atoll_server.data.merged_units import MergedUnits


@dataclass(frozen=True, slots=True)
class Declared:
    """A dataset as declared by the first learner that used it. tokens: number of tokens per unit; 0 if unknown.

    fingerprint: identifies the content of the data. epochs: number of times that each unit is trained.
    """

    name: str
    units: int
    tokens: int
    seed: int
    epochs: int
    fingerprint: str

    @property
    def positions(self) -> int:
        """The number of units of all epochs."""
        return self.units * self.epochs


# Reasons for the end of a lease. After LEFT and FENCED, the process sends no more work. Otherwise, it may come back.
LEFT = "its learner left"
FENCED = "a newer process has its learner's name"
GONE = "an operator recorded the end of its process"
EVICTED = "its learner was evicted"
SILENT = "silent"


class Outcome(StrEnum):
    """The state of a unit under one lease."""

    LEASED = "leased"  # not decided yet
    CONSUMED = "consumed"  # decided early: the rest of its work may still be merged
    RETURNED = "returned"  # decided early, and handed out again or in the pool


@dataclass(frozen=True, slots=True)
class LeasedUnit:
    """A unit of a lease, as the ledger stores it.

    merged: the unit's merged part when it was decided early, in parameters.
    """

    lease: int
    ordinal: int
    position: int
    outcome: Outcome = Outcome.LEASED
    merged: int = 0


@dataclass(slots=True)
class Lease:
    """A lease. The ledger stores the fields up to `ended` and the units.

    handed: number of positions handed out. ended: the reason why the lease ended; empty before its end. finished:
    number of units that the lease's process has finished, as last reported. by_fragment: merged work on the lease's
    units, keyed by fragment. settled: whether no shard can merge more work on its units. overdue: whether its units are
    decided early. decided_with: `by_fragment` when this was last done.
    """

    id: int
    dataset: int
    learner: str
    incarnation: int
    handed: int = 0
    ended: str = ""
    finished: int = 0
    units: dict[int, LeasedUnit] = field(default_factory=dict)  # by ordinal, ascending
    by_fragment: dict[int, MergedUnits] = field(default_factory=dict)
    settled: bool = False
    overdue: bool = False
    decided_with: dict[int, MergedUnits] | None = None


@dataclass(slots=True)
class Dataset:
    """A dataset's account. next: the first position that was never handed out. pool: sorted returned positions.

    consumed: number of consumed units. repeated: work that was merged repeatedly. lost: work on consumed units that was
    never merged. `repeated` and `lost` are in units x parameters.
    """

    id: int
    declared: Declared
    next: int = 0
    pool: list[int] = field(default_factory=list)
    consumed: int = 0
    repeated: int = 0
    lost: int = 0

    @property
    def leased(self) -> int:
        """The number of units that are handed out but not decided."""
        return self.next - len(self.pool) - self.consumed

    @property
    def epoch(self) -> int:
        """The epoch of the next unit, starting from 0. Equals the number of epochs once all units are handed out."""
        return (self.pool[0] if self.pool else self.next) // self.declared.units


@dataclass(slots=True)
class Changes:
    """Rows to store in one transaction. A value of None deletes the row."""

    datasets: dict[int, Dataset] = field(default_factory=dict)
    leases: dict[int, Lease | None] = field(default_factory=dict)
    units: dict[tuple[int, int], LeasedUnit | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.datasets or self.leases or self.units)


class Accounts:
    """The accounts of all datasets of a run. lengths: as in `measure`; empty before the run has parameters."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self.measure(lengths)
        self.datasets: dict[int, Dataset] = {}
        self.leases: dict[int, Lease] = {}

    def measure(self, lengths: Mapping[int, int]) -> None:
        """Sets the fragments of the run. lengths: number of parameters in each fragment."""
        self._lengths = lengths
        self.parameters = sum(lengths.values())

    def restore(self, datasets: Iterable[Dataset], leases: Iterable[Lease], units: Iterable[LeasedUnit]) -> None:
        """Adds the rows of the ledger.

        They contain a lease's fields up to `ended`.
        """
        self.datasets.update((each.id, each) for each in datasets)
        self.leases.update((each.id, each) for each in leases)
        for unit in sorted(units, key=lambda each: each.ordinal):
            self.leases[unit.lease].units[unit.ordinal] = unit

    # ------------------------------------------------------------------------------ handing out

    def named(self, name: str) -> Dataset | None:
        return next((each for each in self.datasets.values() if each.declared.name == name), None)

    def add(self, declared: Declared, changes: Changes) -> Dataset:
        """Adds a dataset, whose name must be new."""
        dataset = Dataset(1 + max(self.datasets, default=0), declared)
        self.datasets[dataset.id] = changes.datasets[dataset.id] = dataset
        return dataset

    def open_lease(self, lease: Lease, changes: Changes) -> None:
        self.leases[lease.id] = changes.leases[lease.id] = lease

    def hand_out(self, lease: Lease, wanted: int, changes: Changes) -> list[LeasedUnit]:
        """Hands out `wanted` units, or as many as are left. Returned units come first."""
        assert not lease.ended, "an ended lease gets no units"
        dataset, given = self.datasets[lease.dataset], list[LeasedUnit]()
        while len(given) < wanted and (dataset.pool or dataset.next < dataset.declared.positions):
            if dataset.pool:
                position = dataset.pool.pop(0)
            else:
                position = dataset.next
                dataset.next += 1
            lease.handed += 1
            unit = LeasedUnit(lease.id, lease.handed, position)
            lease.units[unit.ordinal] = changes.units[lease.id, unit.ordinal] = unit
            given.append(unit)
        if given:
            changes.datasets[dataset.id], changes.leases[lease.id] = dataset, lease
        return given

    def all_finished(self, dataset: Dataset) -> bool:
        """Returns whether no unit is left to train. Units may still return if a learner is lost before the merges."""
        if dataset.pool or dataset.next < dataset.declared.positions:
            return False
        mine = (lease for lease in self.leases.values() if lease.dataset == dataset.id and any(_undecided(lease)))
        return all(not lease.ended and lease.finished >= lease.handed for lease in mine)

    # ------------------------------------------------------------------------------ facts

    def end(self, lease: Lease, why: str, changes: Changes) -> None:
        """Ends a lease. Its units return to the pool when they are decided, unless they are consumed."""
        if not lease.ended:
            lease.ended = why
            changes.leases[lease.id] = lease

    def decide(self, lease: Lease, changes: Changes) -> None:
        """Decides all units of a lease that can be decided. Also counts merges of units that were decided early."""
        through = min((lease.by_fragment.get(each, MergedUnits()).through for each in self._lengths), default=0)
        settled, early = bool(lease.ended) and lease.settled, bool(lease.ended) and lease.overdue
        if not settled and lease.decided_with == lease.by_fragment:
            return
        decided = list[int]()
        for unit in lease.units.values():
            final = settled or unit.ordinal <= through
            if unit.outcome is not Outcome.LEASED or final or early:
                self._book(unit, changes)
            elif not lease.ended:
                break  # no later unit can be decided either
            if final:
                decided.append(unit.ordinal)
        for ordinal in decided:
            del lease.units[ordinal]
            changes.units[lease.id, ordinal] = None
        lease.decided_with = dict(lease.by_fragment) if early else None
        if lease.ended and not lease.units:
            del self.leases[lease.id]
            changes.leases[lease.id] = None

    def concluded(self) -> list[Dataset]:
        """Returns the datasets' accounts as they would be if all leases ended now and no more work were merged."""
        found = {number: replace(dataset, pool=list(dataset.pool)) for number, dataset in self.datasets.items()}
        for lease in self.leases.values():
            last = max((each.through for each in lease.by_fragment.values()), default=0)
            for unit in lease.units.values():
                part = self.merged_part(unit) if unit.ordinal <= last else 0
                booked(found[lease.dataset], unit, part, self.parameters)
        return list(found.values())

    def merged_part(self, unit: LeasedUnit) -> int:
        """Returns a unit's merged part under its lease, in parameters."""
        fragments = self.leases[unit.lease].by_fragment.items()
        return sum(self._lengths[fragment] for fragment, merged in fragments if merged.contains(unit.ordinal))

    def _book(self, unit: LeasedUnit, changes: Changes) -> None:
        lease, part = self.leases[unit.lease], self.merged_part(unit)
        if unit.outcome is Outcome.LEASED or part != unit.merged:
            after = booked(self.datasets[lease.dataset], unit, part, self.parameters)
            lease.units[unit.ordinal] = changes.units[unit.lease, unit.ordinal] = after
            changes.datasets[lease.dataset] = self.datasets[lease.dataset]


def booked(dataset: Dataset, unit: LeasedUnit, part: int, parameters: int) -> LeasedUnit:
    """Decides a unit, or counts the later merges of a unit that was decided early. Returns the changed unit.

    dataset: the unit's dataset, which is changed in place. part: the unit's merged part. parameters: number of
    parameters of the run.
    """
    outcome = unit.outcome
    match outcome:
        case Outcome.LEASED if 2 * part >= parameters:
            outcome = Outcome.CONSUMED
            dataset.consumed += 1
            dataset.lost += parameters - part
        case Outcome.LEASED:
            outcome = Outcome.RETURNED
            dataset.repeated += part
            insort(dataset.pool, unit.position)
        case Outcome.CONSUMED:
            dataset.lost -= part - unit.merged
        case Outcome.RETURNED:
            dataset.repeated += part - unit.merged
    return replace(unit, outcome=outcome, merged=part)


def _undecided(lease: Lease) -> Iterator[LeasedUnit]:
    return (unit for unit in lease.units.values() if unit.outcome is Outcome.LEASED)


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Returns ascending numbers as a list of runs of consecutive numbers. Each run is [first, last]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def numbers_in(runs: Iterable[Iterable[int]]) -> list[int]:
    """Returns the numbers in these runs. This is the inverse of `runs_of`."""
    return [number for first, last in runs for number in range(first, last + 1)]
