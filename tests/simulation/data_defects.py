"""Deliberate defects in the accounts of data units. `defects` has all others of one core."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from atoll.data import unit_log
from atoll_server.data import accounts, merged_units
from atoll_server.learners import goodput
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.ledger import data_ledger
from atoll_server.ledger.rows import ContributionRow, FateRow
from atoll_server.rounds import liveness
from atoll_server.run import datasets
from atoll_server.run.known_run import KnownRun
from atoll_server.service import learner_service
from atoll_server.shard import contributions
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import Fate

Patch = Callable[[Any, str, Any], AbstractContextManager[Any]]


def ended_leases_do_not_wait(patch: Patch) -> Iterator[None]:
    """A lost learner's units are decided immediately, although its pending work may still be merged."""
    conclude = datasets.Datasets._conclude

    def at_once(self: datasets.Datasets, lease: accounts.Lease, now: float) -> None:
        conclude(self, lease, now)
        lease.settled = bool(lease.ended)

    with patch(datasets.Datasets, "_conclude", at_once):
        yield


def dropped_work_on_units_counts_as_merged(patch: Patch) -> Iterator[None]:
    """All units up to the newest merged one count as consumed, although the learner dropped work in between."""

    def contains(self: merged_units.MergedUnits, ordinal: int) -> bool:
        return ordinal <= self.through

    with patch(merged_units.MergedUnits, "contains", contains):
        yield


def refused_work_on_units_counts_as_merged(patch: Patch) -> Iterator[None]:
    """A refused contribution's units count like those of a merged one."""
    end = contributions.Contributions.end

    def both(self: contributions.Contributions, row: ContributionRow, fate: FateRow) -> None:
        end(self, row, fate)
        if fate.fate is Fate.REFUSED:
            self._merge_units(row.key, row.units)

    with patch(contributions.Contributions, "end", both):
        yield


def leased_units_are_forgotten_at_a_restart(patch: Patch) -> Iterator[None]:
    """A restarted registrar knows its leases, but not their units."""
    restore = data_ledger.restore

    def without(db: sqlite3.Connection, accounts: accounts.Accounts) -> None:
        restore(db, accounts)
        for lease in accounts.leases.values():
            lease.units.clear()

    with patch(data_ledger, "restore", without):
        yield


def decisions_about_units_are_not_stored(patch: Patch) -> Iterator[None]:
    """Only new leases are stored, not decisions about units (an early version did this before it refused a request)."""

    async def look(self: datasets.Datasets) -> None:
        self._decide(accounts.Changes())

    with patch(datasets.Datasets, "look", look):
        yield


def a_unit_is_named_by_two_contributions(patch: Patch) -> Iterator[None]:
    """A contribution also names the last unit of the previous one."""
    ranges = unit_log.UnitLog.ranges

    def more(self: unit_log.UnitLog, after: int, upto: int) -> tuple[tuple[int, int, int], ...]:
        return tuple((lease, max(0, low - 1), high) for lease, low, high in ranges(self, after, upto))

    with patch(unit_log.UnitLog, "ranges", more):
        yield


def a_waiting_learner_delays_pending_work(patch: Patch) -> Iterator[None]:
    """Pending work waits for a paused learner that has taken no step, which may wait for this work's units."""

    def expected(self: liveness.LearnerLiveness, now: float) -> bool:
        seen_at = max(self.joined_at, self.stepped_at or 0.0, self.heard_at if self.paused or self._woke() else 0.0)
        return not self.gone and now - seen_at <= max(liveness.EXPECTED_S, self.silent_after_s())

    with patch(liveness.LearnerLiveness, "expected", expected):
        yield


def a_late_report_undoes_a_departure(patch: Patch) -> Iterator[None]:
    """A report that arrives while a Leave is saved counts, so the learner keeps its units."""
    progress = learner_service.progress

    def counts(run: KnownRun, most: int, entry: RegistryEntry, seen: pb.Progress) -> None:
        entry.account.left_at = None
        progress(run, most, entry, seen)

    with patch(learner_service, "progress", counts):
        yield


def what_an_operator_ended_counts_as_left(patch: Patch) -> Iterator[None]:
    """After an operator ended a process, its units are decided for good, although it may come back with its work."""
    left = goodput.TimeAccount.left

    def by_itself(self: goodput.TimeAccount, now: float, *, itself: bool) -> None:
        left(self, now, itself=True)

    with patch(goodput.TimeAccount, "left", by_itself):
        yield


DATA_DEFECTS = (
    ended_leases_do_not_wait,
    dropped_work_on_units_counts_as_merged,
    refused_work_on_units_counts_as_merged,
    leased_units_are_forgotten_at_a_restart,
    decisions_about_units_are_not_stored,
    a_unit_is_named_by_two_contributions,
    a_waiting_learner_delays_pending_work,
    a_late_report_undoes_a_departure,
    what_an_operator_ended_counts_as_left,
)
