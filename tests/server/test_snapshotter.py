"""When a snapshot is due: by time, or by what a start would have to do without it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from atoll_server.learners.registry import Roster
from atoll_server.shard.snapshotter import LONGEST_REPLAY_S, Snapshotter
from atoll_server.storage.disk import Disk
from atoll_server.storage.lineage import Line
from atoll_wire.layout import MergeKind, TensorSpec, plan


@pytest.fixture
def shard():
    return SimpleNamespace(
        fragments={0: None},
        line=Line(),
        roster=Roster(1),
        settings=SimpleNamespace(snapshot_every_s=120.0),
        unsaved_s=0.0,
        versions=lambda: {0: 1},
    )


def due(shard, after_s: float, monkeypatch, took_s: float = 0.0) -> bool:
    async def asked() -> bool:
        keeper = Snapshotter(shard, [], [], shard.unsaved_s, damaged=False)
        keeper._took_s = took_s
        now = time.monotonic() + after_s
        monkeypatch.setattr(time, "monotonic", lambda: now)
        return keeper.due()

    return asyncio.run(asked())


def test_a_snapshot_is_due_when_its_time_has_come(shard, monkeypatch):
    assert not due(shard, 110.0, monkeypatch)
    assert due(shard, 121.0, monkeypatch)


def test_or_when_a_start_would_have_to_merge_for_too_long(shard, monkeypatch):
    shard.unsaved_s = LONGEST_REPLAY_S
    assert due(shard, 1.0, monkeypatch)


def test_but_not_again_and_again_where_writing_one_takes_long(shard, monkeypatch):
    shard.unsaved_s = 100.0
    assert not due(shard, 9.0, monkeypatch, took_s=1.0)
    monkeypatch.undo()
    assert due(shard, 11.0, monkeypatch, took_s=1.0)


def test_nothing_new_is_never_due(shard, monkeypatch):
    shard.versions = dict
    shard.unsaved_s = 100.0
    keeper_rows = [SimpleNamespace(versions={})]

    async def asked() -> bool:
        keeper = Snapshotter(shard, [], [], shard.unsaved_s, damaged=False)
        keeper.rows = keeper_rows
        return keeper.due()

    assert not asyncio.run(asked())


def test_one_that_cannot_be_written_leaves_nothing_and_is_not_tried_again_at_once(shard, tmp_path, monkeypatch):
    layout = plan([TensorSpec("a", (4,), "float32", MergeKind.DIRECTION)], 1)
    shard.disk, shard.settings.directory = Disk(), tmp_path
    shard.fragments = {0: SimpleNamespace(place=layout.fragments[0], lock=asyncio.Lock())}
    shard.failed, shard.unsaved_s = True, 100.0
    began = time.monotonic()

    async def asked() -> None:
        keeper = Snapshotter(shard, [], [], shard.unsaved_s, damaged=True)
        assert keeper.due()
        with pytest.raises(OSError, match="not written down"):
            await keeper.take()
        assert not keeper.due()
        monkeypatch.setattr(time, "monotonic", lambda: began + 60.0)
        assert keeper.due()

    asyncio.run(asked())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_damaged_one_is_made_up_for_at_once(shard):
    shard.versions = dict

    async def asked() -> bool:
        keeper = Snapshotter(shard, [SimpleNamespace(versions={}, generation=1)], [], shard.unsaved_s, damaged=True)
        return keeper.due()

    assert asyncio.run(asked())
