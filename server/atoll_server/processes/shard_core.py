"""A core process with only a shard. It attaches to the run's registrar and serves learners and fronts directly."""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import structlog
from atoll_wire import shards_pb2 as sh
from atoll_wire.contract import PROTOCOL
from atoll_wire.errors import SettingsError
from atoll_wire.layout.layout import Layout
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.checkpoints.restore import INITIAL, Restored, initial_state, stored_layout
from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_server.ledger import database, run_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.memory_budget import parameters_of, too_much
from atoll_server.processes.core_process import CoreProcess, check_startable
from atoll_server.processes.replica import Replica
from atoll_server.run.initial_parameters import StagedFile, check_room
from atoll_server.settings import CoreSettings
from atoll_server.shard_context.run_view import RunView
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk
from atoll_server.telemetry import entries

log = structlog.get_logger()

DIRECTORY_BYTES = 16


class GenerationChangedError(SettingsError):
    """The run was restored to a checkpoint, so this process must roll its shard back and start again.

    generation: the run's new generation. snapshot: the shard's snapshot from which the generation began.
    """

    def __init__(self, generation: int, snapshot: int) -> None:
        super().__init__(f"the run was restored to a checkpoint (generation {generation}): this shard rolls back")
        self.generation = generation
        self.snapshot = snapshot


class ShardCore(CoreProcess):
    """The process of one shard. directory: identifier of its directory. changed: whether the shard must start again."""

    run: Replica

    def __init__(self, settings: CoreSettings, disk: Disk = DISK, clock: Clock = SYSTEM) -> None:
        super().__init__(settings, disk, clock)
        assert settings.shard is not None, "the process was started with --shard"
        self.run = Replica(settings.limits, self.run_clock, self.journal, settings.shard)
        self.directory = b""
        self.staged = b""
        self.changed: GenerationChangedError | None = None

    async def start(self) -> None:
        await super().start()
        self.journal.record(entries.Started(self.run.epoch), self.clock.monotonic())

    def _take_meta(self, db: sqlite3.Connection) -> dict[str, Any]:
        meta = run_ledger.get_meta(db)
        check_startable(meta)
        assert self.settings.shard is not None
        place = [self.settings.shard.number, self.settings.shard.count]
        if "fingerprint" in meta and meta.get("shard") != place:
            held, fix = "the run's registrar", "omit --registrar"
            if "shard" in meta:
                number, count = meta["shard"]
                held, fix = f"shard {number}/{count}", f"give --shard {number}/{count}"
            raise SettingsError(
                f"--shard {self.settings.shard}: the directory holds {held}: {fix} or give another --dir, or stop all "
                "cores and use atoll reshard"
            )
        if reason := too_much(parameters_of(meta), self.settings.memory):
            raise SettingsError(reason)
        meta["shard"] = place
        meta.setdefault("directory", secrets.token_bytes(DIRECTORY_BYTES).hex())
        meta["epoch"] = meta.get("epoch", 0) + 1
        with database.transaction(db):
            for key, value in meta.items():
                run_ledger.put_meta(db, key, value)
        crash_points.point("start.epoch raised")
        return meta

    async def _restore(self, db: sqlite3.Connection, meta: dict[str, Any], writer: LedgerWriter) -> None:
        self.run.restore(meta, run_ledger.learners(db), writer)
        self.directory = bytes.fromhex(meta["directory"])
        self.staged = bytes.fromhex(meta.get(run_ledger.STAGED, ""))
        if "fingerprint" in meta:
            await self.restore_shard(db, meta)

    # ------------------------------------------------------------------------------ to and from the registrar

    def hello(self, address: str) -> sh.Hello:
        """Returns the first message to the registrar.

        address: address at which learners and fronts reach this shard.
        """
        assert self.settings.shard is not None
        begun = self.run.shard is not None
        return sh.Hello(
            protocol=PROTOCOL,
            shard=self.settings.shard.number,
            shards=self.settings.shard.count,
            address=address,
            run=self.run.run_id if begun else "",
            generation=self.run.generation if begun else 0,
            staged=self.staged,
            directory=self.directory,
            epoch=self.run.view().epoch if begun else 0,
        )

    async def welcomed(self, welcome: sh.Welcome) -> None:
        """Applies the registrar's first message.

        Raises GenerationChangedError if the run was restored, and SettingsError if this shard cannot roll back.
        """
        if self.run.shard is not None and welcome.generation != self.run.generation:
            if not welcome.checkpoint:
                raise SettingsError(
                    f"the registrar is at generation {welcome.generation}, but this shard is at "
                    f"{self.run.generation}: restore both from backups that were taken at the same time"
                )
            raise GenerationChangedError(welcome.generation, welcome.checkpoint)
        await self.run.welcomed(welcome)

    async def told(self, message: sh.FromRegistrar) -> None:
        """Applies a message about a learner or the run, durably."""
        match message.WhichOneof("what"):
            case "member":
                await self.run.member(message.member)
            case "view":
                seen = message.view
                await self.run.viewed(
                    RunView(
                        seen.epoch,
                        seen.sequence,
                        seen.run_tokens,
                        seen.voided_tokens,
                        seen.paused,
                        seen.slot,
                        seen.slot_s,
                    )
                )
            case "keep":
                if (shard := self.run.shard) is not None:
                    await shard.snapshots.keep(message.keep.snapshots, message.keep.through)
            case "lease":
                self.run.lease(message.lease)
            case "begun":
                await self._begun(message.begun)

    async def stage(self, stage: sh.Stage, chunks: AsyncIterator[sh.FetchInitialReply]) -> None:
        """Durably writes this shard's part of the initial parameters. Raises Refused if the part is incomplete."""
        layout = _layout(stage)
        directory, limit = self.settings.directory, self.settings.limits.model_bytes
        parameters = sum(layout.fragments[index].length for index in stage.owned)
        check_room(self.settings, min(limit, 4 * parameters), parameters, self.disk)
        file = StagedFile(directory, limit, b"", self.disk)
        await asyncio.to_thread(file.begin)
        try:
            async for reply in chunks:
                if reply.WhichOneof("what") == "sha256":
                    file.sha256, file.size_bytes = reply.sha256, file.received
                else:
                    await asyncio.to_thread(file.take, reply.chunk)
            await asyncio.to_thread(file.check)
            if self.staged:  # the new file must never be mistaken for the older parameters
                await self.run.writer.commit(partial(run_ledger.put_all_meta, meta={run_ledger.STAGED: ""}))
                self.staged = b""
            await asyncio.to_thread(file.publish, directory)
        finally:
            await asyncio.to_thread(file.close)
        values = {run_ledger.STAGED: stage.sha256.hex(), "initial_sha256": file.sha256.hex()}
        await self.run.writer.commit(partial(run_ledger.put_all_meta, meta=values))
        crash_points.point("stage.committed")
        self.staged = stage.sha256
        self.run.initial_sha256 = file.sha256.hex()

    async def _begun(self, begun: sh.Begun) -> None:
        """Starts the shard with the parameters that the registrar has chosen, unless the shard is already running."""
        if self.run.shard is not None:
            return
        stage = begun.stage
        layout = _layout(stage)
        owned = sorted(stage.owned)
        meta = {
            "tensors": json.loads(stage.tensors),
            "fragments": stage.fragments,
            "fingerprint": stage.fingerprint.hex(),
            "owned": owned,
            "owned_parameters": sum(layout.fragments[index].length for index in owned),
            "settings": json.loads(begun.settings),
        }
        file = open_tensors(self.settings.directory / INITIAL, self.disk)
        states = await asyncio.to_thread(
            lambda: {index: initial_state(layout, file, layout.fragments[index]) for index in owned}
        )
        await self.run.writer.commit(partial(run_ledger.put_all_meta, meta=meta))
        crash_points.point("begun.committed")
        self.run.settings = self.run.settings.changed(**meta["settings"])
        self.begin(Restored(layout, file, states, {}, []))
        self.journal.record(entries.InitialParameters(meta["owned_parameters"], len(owned)), self.clock.monotonic())


def _layout(stage: sh.Stage) -> Layout:
    return stored_layout(
        {"tensors": json.loads(stage.tensors), "fragments": stage.fragments, "fingerprint": stage.fingerprint.hex()}
    )
