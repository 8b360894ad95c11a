"""Deliberate defects of a run with several shards, which its simulation must find (see `find_defects`)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from typing import Any

from atoll_server.ledger import run_ledger
from atoll_server.ledger.manifests import KeptSnapshots, Manifest
from atoll_server.operators.run_checkpoints import RunCheckpoints
from atoll_server.processes.core import Core
from atoll_server.processes.replica import Replica
from atoll_server.run.attached_shards import AttachedShards
from atoll_server.service import shard_operator_service
from atoll_server.shard.shard import Shard
from atoll_server.shard_context.run_view import RunView
from atoll_wire import outer_pb2 as pb
from atoll_wire import shards_pb2 as sh
from atoll_wire.layout.layout import Layout

from tests.simulation.defects import Defect, patch

SHARDED_DEFECTS: dict[str, Defect] = {}


def defect(function: Defect) -> Defect:
    """Adds a defect to the list. Its docstring states what is wrong."""
    SHARDED_DEFECTS[function.__name__] = function
    return function


@defect
def a_fragment_is_owned_twice() -> Iterator[None]:
    """The last shard also begins with fragment 0."""
    fragments = AttachedShards.fragments

    def and_the_first(self: AttachedShards, layout: Layout, number: int) -> tuple[int, ...]:
        mine = fragments(self, layout, number)
        return tuple(sorted({0, *mine})) if number == self.count - 1 else mine

    with patch(AttachedShards, "fragments", and_the_first):
        yield


@defect
def a_run_begins_before_all_shards_have_staged() -> Iterator[None]:
    """The registrar records the parameters as chosen before all shards have them on disk."""

    async def at_once(self: AttachedShards, stage: sh.Stage, layout: Layout) -> None:
        self._stage = stage
        self.runs(layout)

    with patch(AttachedShards, "stage", at_once):
        yield


@defect
def staged_parameters_are_not_durable() -> Iterator[None]:
    """A shard reports that it has staged the parameters, but does not record this."""

    def forgetful(db: sqlite3.Connection, meta: dict[str, Any]) -> None:
        for key, value in meta.items():
            if key != run_ledger.STAGED:
                run_ledger.put_meta(db, key, value)

    with patch(run_ledger, "put_all_meta", forgetful):
        yield


@defect
def a_view_is_compared_without_its_epoch() -> Iterator[None]:
    """A restarted registrar counts views from 1 again, so shards ignore its first ones."""
    with patch(RunView, "newer_than", lambda self, other: self.sequence > other.sequence):
        yield


@defect
def a_view_is_compared_by_tokens() -> Iterator[None]:
    """A shard uses the view with more tokens, even if it is older."""
    with patch(RunView, "newer_than", lambda self, other: self.run_tokens > other.run_tokens):
        yield


@defect
def an_eviction_is_not_applied_at_shards() -> Iterator[None]:
    """A shard confirms an eviction, but still admits the learner."""
    member = Replica.member

    async def without(self: Replica, message: sh.Member) -> None:
        message.evicted = ""
        await member(self, message)

    with patch(Replica, "member", without):
        yield


@defect
def a_pause_is_confirmed_before_it_is_durable() -> Iterator[None]:
    """A shard confirms a pause before it is durable."""

    async def later(self: Replica) -> None:
        self._stored = self._view

    with patch(Replica, "save_view", later):
        yield


@defect
def a_shard_forgets_evictions() -> Iterator[None]:
    """A shard applies an eviction only in memory."""
    save = Replica.save

    async def in_memory(self: Replica, entry: Any) -> None:
        if entry.evicted:
            entry.unsaved = False
        else:
            await save(self, entry)

    with patch(Replica, "save", in_memory):
        yield


@defect
def a_cut_mixes_manifests() -> Iterator[None]:
    """A checkpoint names the snapshot of one shard that the checkpoint before it named, with that one's versions."""
    write = RunCheckpoints._write

    async def mixed(self: RunCheckpoints, outcomes: dict[int, Any], datasets: list[Any]) -> Manifest:
        taken = outcomes[number := max(outcomes)]
        if self._run.manifests and isinstance(taken, pb.Checkpoint):
            before = self._run.manifests[-1]
            taken.id, taken.generation = before.snapshots[number], self._run.generation
            taken.versions.update({index: before.versions[index] for index in taken.versions})
        return await write(self, outcomes, datasets)

    with patch(RunCheckpoints, "_write", mixed):
        yield


@defect
def a_manifest_is_written_before_its_snapshots_are_durable() -> Iterator[None]:
    """A shard reports its snapshot for a manifest when it begins to write the snapshot."""
    begun = set[asyncio.Task[Any]]()

    async def at_once(shard: Shard, *, keep: bool = False) -> pb.Checkpoint:
        snapshots = shard.snapshots
        begun.add(task := asyncio.create_task(snapshots.take(keep=keep)))
        task.add_done_callback(begun.discard)
        number = 1 + max((row.id for row in snapshots.all()), default=0)
        return pb.Checkpoint(id=number, versions=shard.versions(), generation=shard.context.generation)

    with patch(shard_operator_service, "take_snapshot", at_once):
        yield


@defect
def a_snapshot_of_a_manifest_is_deleted() -> Iterator[None]:
    """A shard deletes its old snapshots even if a manifest names them."""
    with patch(KeptSnapshots, "told", lambda self, snapshots, through: KeptSnapshots(frozenset(), through)):
        yield


@defect
def a_shard_rolls_back_to_another_manifest() -> Iterator[None]:
    """After a restore, the registrar sends the shards the newest manifest's snapshots."""
    welcome = Core.welcome

    def newest(self: Core, number: int) -> sh.Welcome:
        message = welcome(self, number)
        if message.checkpoint:
            message.checkpoint = self.run.manifests[-1].snapshots[number]
        return message

    with patch(Core, "welcome", newest):
        yield
