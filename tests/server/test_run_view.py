"""The registrar's newest view reaches every shard and its followers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from atoll_server.processes.replica import Replica
from atoll_server.run.attached_shards import AttachedShards
from atoll_server.run.outbox import Outbox
from atoll_server.run.registrar import Registrar
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits
from atoll_server.shard.shard import Shard
from atoll_server.shard_context.run_view import RunView
from atoll_server.telemetry import entries
from atoll_server.telemetry.journal import Journal
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.layout import plan

from tests.bare_shard import Rows, bare_shard
from tests.clocks import SetClock
from tests.simulation.training import TENSORS


async def committed(operation: object) -> None:
    """Stands in for the ledger's writer."""


@pytest.fixture
def shards(tmp_path):
    layout = plan(TENSORS, 2)
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(bare_shard(tmp_path / name, layout, Limits(), Rows(), []))
    return made


def heard(shard: Shard, log: int, sequence: int) -> list[pb.Notification]:
    """Returns a follower's notifications from this position until the shard's log closes."""
    shard.follower_log.close()

    async def follow() -> list[pb.Notification]:
        return [each async for each in shard.follower_log.follow("a", log, sequence)]

    return asyncio.run(follow())


def test_followers_of_every_shard_hear_of_a_pause_at_that_shards_positions(shards):
    attached = AttachedShards(own=0, count=2)
    run = Registrar(Limits(), RunClock(SetClock()), Journal(), attached)
    one, two = shards
    run.runs(one.layout, one)
    copy = Replica(Limits(), RunClock(SetClock()), Journal(), 1)
    copy.writer = SimpleNamespace(commit=committed)
    copy.runs(two.layout, two)
    assert one.follower_log.number != two.follower_log.number
    one.follower_log.on(entries.RoundOpened(0, 1), 0.0)
    run.paused = "by alice: the link is repaired"
    box = attached.shards[1].outbox = Outbox()
    run.tell()
    sent = asyncio.run(box.next()).view
    asyncio.run(copy.viewed(RunView(sent.epoch, sent.sequence, sent.run_tokens, sent.voided_tokens, sent.paused)))
    for shard, before in ((one, 1), (two, 0)):
        paused, _ = heard(shard, shard.follower_log.number, before)
        assert (paused.sequence, paused.paused.reason) == (before + 1, run.paused)
        current, *_ = heard(shard, 0, 0)
        assert current.current.paused.reason == run.paused


def test_an_older_view_changes_nothing_although_it_has_more_tokens(shards):
    shard, _ = shards
    shard.told(RunView(2, 1, run_tokens=60, voided_tokens=40))
    for older in (RunView(2, 1, 100), RunView(1, 9, 100, paused="by bob: a test")):
        shard.told(older)
        assert (shard.view.run_tokens, shard.view.paused) == (60, "")
    assert [each.WhichOneof("what") for each in heard(shard, shard.follower_log.number, 0)] == ["shutting_down"]
