"""The registrar limits leased units, and decides about them in an order that survives crashes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from atoll_server.access.refusals import Refused
from atoll_server.data.accounts import EVICTED, SILENT, Accounts, Changes
from atoll_server.data.merged_units import MergedUnits
from atoll_server.learners.goodput import TimeAccount
from atoll_server.run.datasets import MAX_HELD, MAX_WANTED, Datasets
from atoll_wire import outer_pb2 as pb
from atoll_wire.process.clock import SYSTEM

HERE = TimeAccount(first_joined_at=0.0, heard_at=0.0)
CORPUS = pb.DatasetDeclaration(name="corpus", units=1 << 30, epochs=1)


class Leasing:
    """Datasets of a run whose ledger and shards do nothing."""

    def __init__(self) -> None:
        async def commit(_) -> None:
            """Stores nothing."""

        nothing = lambda *_: None  # noqa: E731
        self.accounts = Accounts({0: 8})
        run = SimpleNamespace(
            data=self.accounts,
            clock=SYSTEM,
            running=nothing,
            attached=SimpleNamespace(await_lease=nothing),
            writer=SimpleNamespace(commit=commit),
        )
        self.datasets = Datasets(run, SimpleNamespace(units_silence_s=300.0))

    def ask(self, name: str, **fields: int) -> pb.LeaseUnitsReply:
        process = SimpleNamespace(entry=SimpleNamespace(name=name), incarnation=1, check_current=lambda: None)
        request = pb.LeaseUnitsRequest(dataset=CORPUS, **({"wanted": 1 << 20} | fields))
        return asyncio.run(self.datasets.lease(process, request))


def test_a_learner_holds_a_limited_number_of_units():
    leasing, lease, replies = Leasing(), 0, []
    for received in range(0, MAX_HELD + 3 * MAX_WANTED, MAX_WANTED):
        replies.append(leasing.ask("a", lease=lease, received=min(received, MAX_HELD)))
        lease = replies[-1].lease
    assert {len(reply.units) for reply in replies[:-3]} == {MAX_WANTED}
    assert [(len(reply.units), reply.state) for reply in replies[-3:]] == [(0, pb.LeaseUnitsReply.STATE_WAIT)] * 3
    assert sum(len(lease.units) for lease in leasing.accounts.leases.values()) == MAX_HELD
    assert len(leasing.ask("b", wanted=4).units) == 4


def test_a_lease_whose_reply_was_lost_is_sent_again():
    leasing = Leasing()
    lost = leasing.ask("a", lease=7, wanted=3)  # the lease that the learner had before
    again = leasing.ask("a", lease=7, wanted=3)
    assert (again.lease, list(again.units)) == (lost.lease, list(lost.units))


def test_an_old_call_that_arrives_late_does_not_end_the_lease_in_use():
    """A network may deliver the first call again, long after the learner has used its reply."""
    leasing = Leasing()
    mine = leasing.ask("a", wanted=3)
    assert list(leasing.ask("a", wanted=3).units) == list(mine.units)
    next_units = leasing.ask("a", lease=mine.lease, received=3, finished=3, wanted=2).units
    (lease,) = leasing.accounts.leases.values()
    del lease.units[1]  # decided
    with pytest.raises(Refused, match="contradicts earlier requests"):
        leasing.ask("a", wanted=3)
    assert leasing.ask("a", lease=mine.lease, received=3, wanted=2).units == next_units
    assert [each.ended for each in leasing.accounts.leases.values()] == [""]


def test_units_of_a_lost_lease_are_decided_again_only_after_new_merges():
    """A learner that never comes back may hold many units, and the registrar looks at all leases each second."""
    leasing = Leasing()
    lease = leasing.accounts.leases[leasing.ask("a", wanted=4).lease]
    (dataset,) = leasing.accounts.datasets.values()
    leasing.accounts.end(lease, SILENT, Changes())
    lease.overdue = True
    leasing.accounts.decide(lease, Changes())
    assert len(dataset.pool) == 4
    leasing.accounts.merged_part = None  # may not be called
    leasing.accounts.decide(lease, Changes())
    del leasing.accounts.merged_part
    lease.by_fragment[0] = MergedUnits(1, ((1, 1),))
    leasing.accounts.decide(lease, changes := Changes())
    assert (dataset.repeated, changes.units) == (8, {(lease.id, 1): None})


def test_units_return_at_once_if_an_operator_ends_their_learner_and_later_merges_count():
    """The process may come back with its work, unlike a process that has left by itself."""
    for itself in (False, True):
        leasing, merged = Leasing(), dict[int, MergedUnits]()
        leasing.ask("a", wanted=1)
        run, account = leasing.datasets._run, TimeAccount(first_joined_at=0.0, heard_at=0.0)
        account.left(1.0, itself=itself)
        run.shard, entry = None, SimpleNamespace(incarnation=1, evicted="", account=account)
        run.registry = SimpleNamespace(entries={"a": entry}, since=0.0)
        run.attached = SimpleNamespace(all=tuple, facts=lambda _: [], lease_over=lambda _: None)
        contributions = SimpleNamespace(merged_units=lambda *_, merged=merged: merged)
        run.running = lambda given=contributions: SimpleNamespace(contributions=given, may_merge=lambda *_: False)
        asyncio.run(leasing.datasets.look())
        (dataset,) = leasing.accounts.datasets.values()
        assert dataset.pool == [0]
        assert bool(leasing.accounts.leases) != itself
        merged[0] = MergedUnits(1, ((1, 1),))
        asyncio.run(leasing.datasets.look())
        assert dataset.repeated == (0 if itself else 8)


def test_shards_forget_a_lease_only_after_its_decision_is_stored():
    """A crash that undoes the decision needs the shards' sums again."""
    leasing, seen = Leasing(), list[str]()
    leasing.ask("a", wanted=1)
    run = leasing.datasets._run

    async def commit(_) -> None:
        await asyncio.sleep(0)
        seen.append("stored")

    run.writer.commit, run.shard = commit, None
    run.attached = SimpleNamespace(
        all=tuple, facts=lambda _: [], lease_over=lambda _: seen.append("forgotten"), await_lease=lambda *_: None
    )
    run.registry = SimpleNamespace(entries={"a": SimpleNamespace(incarnation=2, account=HERE)}, since=0.0)
    run.running = lambda: SimpleNamespace(
        contributions=SimpleNamespace(merged_units=lambda *_: {}), may_merge=lambda *_: False
    )
    asyncio.run(leasing.datasets.look())
    assert not leasing.accounts.leases
    assert seen == ["stored", "forgotten"]


def test_merges_of_an_evicted_process_that_is_readmitted_are_counted():
    """Its units return to the pool at once. If the process comes back, its outstanding work may still be merged."""
    leasing, merged = Leasing(), dict[int, MergedUnits]()
    leasing.ask("a", wanted=2)
    run, entry = leasing.datasets._run, SimpleNamespace(incarnation=1, account=HERE)
    run.shard, run.registry = None, SimpleNamespace(entries={"a": entry}, since=0.0)
    run.attached = SimpleNamespace(all=tuple, facts=lambda _: [], lease_over=lambda _: None)
    run.running = lambda: SimpleNamespace(
        contributions=SimpleNamespace(merged_units=lambda *_: merged), may_merge=lambda *_: False
    )
    (lease,) = leasing.accounts.leases.values()
    (dataset,) = leasing.accounts.datasets.values()
    leasing.accounts.end(lease, EVICTED, Changes())
    asyncio.run(leasing.datasets.look())
    assert dataset.pool == [0, 1]
    merged[0] = MergedUnits(1, ((1, 1),))
    asyncio.run(leasing.datasets.look())
    assert (dataset.pool, dataset.consumed, dataset.repeated) == ([0, 1], 0, 8)
    assert [unit.ordinal for unit in lease.units.values()] == [2], "work on the other unit may still be merged"
    entry.incarnation = 2
    asyncio.run(leasing.datasets.look())
    assert not leasing.accounts.leases
