"""The registrar limits leased units, and decides about them in an order that survives crashes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from atoll_server.data.accounts import EVICTED, Accounts, Changes
from atoll_server.data.merged_units import MergedUnits
from atoll_server.run.datasets import MAX_HELD, MAX_WANTED, Datasets
from atoll_wire import outer_pb2 as pb
from atoll_wire.process.clock import SYSTEM

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


def test_a_learner_that_begins_lease_after_lease_holds_a_limited_number_of_units():
    leasing = Leasing()
    replies = [leasing.ask("a", lease=each) for each in range(MAX_HELD // MAX_WANTED + 3)]
    assert len({reply.lease for reply in replies}) == len(replies)
    assert {len(reply.units) for reply in replies[:-3]} == {MAX_WANTED}
    assert [(len(reply.units), reply.state) for reply in replies[-3:]] == [(0, pb.LeaseUnitsReply.STATE_WAIT)] * 3
    assert sum(len(lease.units) for lease in leasing.accounts.leases.values()) == MAX_HELD
    assert len(leasing.ask("b", wanted=4).units) == 4


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
    run.registry = SimpleNamespace(entries={"a": SimpleNamespace(incarnation=2)}, since=0.0)
    run.fenced = lambda *_: True
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
    run, entry = leasing.datasets._run, SimpleNamespace(incarnation=1)
    run.shard, run.registry = None, SimpleNamespace(entries={"a": entry}, since=0.0)
    run.attached = SimpleNamespace(all=tuple, facts=lambda _: [], lease_over=lambda _: None)
    run.fenced = lambda *_: True
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
