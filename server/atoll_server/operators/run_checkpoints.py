"""Takes checkpoints of a run with several shards: first a snapshot of each shard, then a manifest that names them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import structlog
from atoll_wire import outer_pb2 as pb

from atoll_server.access.refusals import Refused, Status
from atoll_server.ledger.manifests import Manifest
from atoll_server.operators.shard_calls import ShardCalls
from atoll_server.processes.core import Core
from atoll_server.processes.core_process import HOUSEKEEPING_S
from atoll_server.run.summaries import checkpoint, manifest_message
from atoll_server.shard.shard import Shard
from atoll_server.storage import crash_points
from atoll_server.telemetry import entries

log = structlog.get_logger()

SNAPSHOT_S = 3600.0  # limit on the seconds that a shard may need for a snapshot; keepalive notices a dead one earlier


async def take_snapshot(shard: Shard, *, keep: bool = False) -> pb.Checkpoint:
    """Takes a snapshot of this process's shard. keep: as in Snapshotter.take. Raises Refused if the disk fails."""
    try:
        return checkpoint(await shard.snapshots.take(keep=keep))
    except OSError as error:
        text = f"the snapshot cannot be written ({error}): check the core's log, its disk and free space"
        raise Refused(Status.RESOURCE_EXHAUSTED, text) from error


class RunCheckpoints:
    """The checkpoints of a run. With only one shard, these are the shard's snapshots."""

    def __init__(self, core: Core, calls: ShardCalls) -> None:
        self._core = core
        self._run = core.run
        self._calls = calls
        self._taking = asyncio.Lock()
        self._through: dict[int, int] = {}  # by shard: the newest snapshot that this process has heard of
        self._taken_at = core.clock.monotonic()

    def all(self) -> list[pb.Checkpoint]:
        """Returns the checkpoints that an operator can restore, oldest first."""
        if self._run.attached.remote:
            return list(map(manifest_message, self._run.manifests))
        shard = self._run.shard
        return [] if shard is None else list(map(checkpoint, shard.snapshots.all()))

    async def take(self) -> pb.Checkpoint:
        """Takes a checkpoint and returns it when it is durable. Continues even if the caller is cancelled.

        Raises Refused if the run has no parameters, if a shard is not attached or if a shard cannot write its snapshot.
        """
        if (own := self._run.shard) is None:
            raise Refused(Status.UNAVAILABLE, "the run has no parameters yet: start a learner first")
        if not self._run.attached.remote:
            return await take_snapshot(own)
        return await asyncio.shield(self._core.underway(self._take(own)))

    async def _take(self, own: Shard) -> pb.Checkpoint:
        async with self._taking:
            self._taken_at = self._core.clock.monotonic()
            attached = self._run.attached
            if missing := attached.missing():
                names = ", ".join(map(str, missing))
                names = f"shard {names} is" if len(missing) == 1 else f"shards {names} are"
                text = (
                    f"{names} not attached, and a checkpoint needs all shards: start the missing shards, then try again"
                )
                raise Refused(Status.UNAVAILABLE, text)
            datasets = self._core.dataset_accounts()  # before any snapshot
            taking: dict[int, Awaitable[Any]] = {attached.own: take_snapshot(own, keep=True)}
            for number in attached.remote:
                request = pb.TakeCheckpointRequest(named=sorted(self._named(number)))
                taking[number] = self._calls.ask(number, "TakeCheckpoint", request, SNAPSHOT_S)
            outcomes = dict(zip(taking, await asyncio.gather(*taking.values(), return_exceptions=True), strict=True))
            try:
                return manifest_message(await self._write(outcomes, datasets))
            finally:
                await self.tell()

    async def _write(self, outcomes: dict[int, Any], datasets: list[Any]) -> Manifest:
        """Writes the manifest. Raises the first error. outcomes: each shard's snapshot or error, keyed by shard.

        datasets: accounts of the datasets before the first snapshot was taken.
        """
        run = self._run
        taken: dict[int, pb.Checkpoint] = {n: each for n, each in outcomes.items() if isinstance(each, pb.Checkpoint)}
        for number, each in taken.items():
            self._through[number] = max(self._through.get(number, 0), each.id)
        for number, each in outcomes.items():
            if isinstance(each, BaseException):
                raise each
            if each.generation != run.generation:
                text = f"shard {number} has not rolled back to the checkpoint yet: try again in a moment"
                raise Refused(Status.UNAVAILABLE, text)
        crash_points.point("manifest.snapshots durable")
        manifest = Manifest(
            id=1 + max((each.id for each in run.manifests), default=0),
            generation=run.generation,
            own=run.attached.own,
            snapshots={number: each.id for number, each in taken.items()},
            versions={index: version for each in taken.values() for index, version in sorted(each.versions.items())},
            taken_at=run.clock.wall(),
            size_bytes=sum(each.size_bytes for each in taken.values()),
            datasets=datasets,
        )
        await run.add_manifest(manifest)
        run.record(entries.SnapshotTaken(manifest.id, sum(manifest.versions.values()), manifest.size_bytes))
        return manifest

    async def tell(self) -> None:
        """Tells all shards which of their snapshots the checkpoints name, so that they delete the others."""
        run = self._run
        for number in (run.attached.own, *run.attached.remote):
            named = self._named(number)
            through = max(self._through.get(number, 0), max(named, default=0))
            if number == run.attached.own:
                if run.shard is not None:
                    await run.shard.snapshots.keep(named, through)
            else:
                run.attached.keep(number, named, through)

    def _named(self, number: int) -> set[int]:
        """Returns the snapshots of a shard that checkpoints name."""
        return {each.snapshots[number] for each in self._run.manifests}

    def due(self) -> bool:
        """Returns whether the interval has passed and versions have changed since the newest checkpoint."""
        run = self._run
        if run.shard is None or not run.attached.remote or self._taking.locked() or run.attached.missing():
            return False
        if self._core.clock.monotonic() - self._taken_at < self._core.settings.snapshot_every_s:
            return False
        versions = run.versions()
        for shard in run.attached.all():
            versions |= shard.versions()
        return not run.manifests or run.manifests[-1].versions != versions

    async def keep_taking(self) -> None:
        """Takes checkpoints of a run with several shards at the interval of its snapshots until cancelled."""
        await self.tell()
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if self.due():
                try:
                    await self.take()
                except Refused as refused:
                    log.warning("the run's checkpoint failed: the registrar tries again later", error=refused.detail)
