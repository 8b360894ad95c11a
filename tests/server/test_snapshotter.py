"""A snapshot is due after an interval, or if a start without it would take too long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from atoll_server.learners.learner_registry import LearnerRegistry
from atoll_server.ledger.lineage import Line
from atoll_server.ledger.manifests import KeptSnapshots
from atoll_server.shard.snapshotter import LONGEST_REPLAY_S, Snapshotter
from atoll_server.storage.disk import Disk
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan

from tests.clocks import SetClock


class World:
    """The dependencies of a snapshotter: one fragment at version 1."""

    def __init__(self) -> None:
        self.clock = SetClock()
        self.settings = SimpleNamespace(snapshot_every_s=120.0, directory=None)
        self.fragments: dict[int, Any] = {0: SimpleNamespace(version=1)}
        self.work = SimpleNamespace(failed=False)
        self.unsaved_s = 0.0
        self.rows: list[Any] = []

    def snapshotter(self, *, damaged: bool = False) -> Snapshotter:
        context: Any = SimpleNamespace(
            clock=self.clock, settings=self.settings, disk=Disk(), registry=LearnerRegistry(1), datasets=list
        )
        restored: Any = SimpleNamespace(
            snapshots=self.rows, undone=[], line=Line(), replay_s=self.unsaved_s, kept=KeptSnapshots(),
            layout=SimpleNamespace(fragments=self.fragments),
        )  # fmt: skip
        spool: Any = None
        return Snapshotter(context, self.fragments, spool, self.work, restored, damaged=damaged)

    def nothing_is_new(self) -> None:
        self.rows = [SimpleNamespace(versions={0: 1})]


@pytest.fixture
def world() -> World:
    return World()


def due(world: World, after_s: float, took_s: float = 0.0) -> bool:
    snapshotter = world.snapshotter()
    snapshotter._took_s = took_s
    world.clock.steady += after_s
    return snapshotter.due()


def test_a_snapshot_is_due_when_its_time_has_come(world):
    assert not due(world, 110.0)
    assert due(world, 121.0)


def test_a_snapshot_is_due_when_a_start_would_merge_for_too_long(world):
    world.unsaved_s = LONGEST_REPLAY_S
    assert due(world, 1.0)


def test_slow_snapshots_are_not_repeated_without_a_break(world):
    world.unsaved_s = 100.0
    assert not due(world, 9.0, took_s=1.0)
    assert due(world, 11.0, took_s=1.0)


def test_without_merges_no_snapshot_is_due(world):
    world.nothing_is_new()
    world.unsaved_s = 100.0
    assert not world.snapshotter().due()


def test_a_failed_snapshot_leaves_no_file_and_is_not_repeated_immediately(world, tmp_path):
    layout = plan([TensorSpec("a", (4,), "float32", MergeKind.DIRECTION)], 1)
    world.settings.directory = tmp_path
    world.fragments = {0: SimpleNamespace(version=1, place=layout.fragments[0], lock=asyncio.Lock())}
    world.work.failed, world.unsaved_s = True, 100.0

    async def asked() -> None:
        snapshotter = world.snapshotter(damaged=True)
        assert snapshotter.due()
        with pytest.raises(OSError, match="no more snapshots"):
            await snapshotter.take()
        assert not snapshotter.due()
        world.clock.steady += 60.0
        assert snapshotter.due()

    asyncio.run(asked())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_damaged_snapshot_is_replaced_immediately(world):
    world.nothing_is_new()
    assert world.snapshotter(damaged=True).due()


def test_snapshots_of_earlier_attempts_at_a_checkpoint_are_not_kept(world):
    """The registrar did not receive the shard's replies, so no checkpoint names these snapshots."""
    snapshotter, stored = world.snapshotter(), []

    async def commit(operation: Any) -> None:
        stored.append(operation.keywords["kept"])

    snapshotter._context.writer = SimpleNamespace(commit=commit)
    snapshotter.kept = KeptSnapshots(frozenset({3, 7, 8}), through=3)
    asyncio.run(snapshotter.keep_only([3]))
    assert snapshotter.kept.snapshots == stored[-1].snapshots == {3}
    snapshotter.kept = snapshotter.kept.plus(9)
    asyncio.run(snapshotter.keep([3], 3))
    assert snapshotter.kept.snapshots == {3, 9}, "a checkpoint may still name the newest"
