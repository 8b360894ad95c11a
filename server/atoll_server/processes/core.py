"""The core process with the registrar: a run's only core, or the first of several."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import uuid
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog
from atoll_wire import shards_pb2 as sh
from atoll_wire.errors import SettingsError
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.checkpoints.parameter_source import open_source
from atoll_server.ledger import data_ledger, database, run_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.memory_budget import parameters_of, too_much
from atoll_server.processes.core_process import CoreProcess, check_startable
from atoll_server.run.attached_shards import AttachedShards
from atoll_server.run.datasets import Datasets
from atoll_server.run.registrar import KEY_BYTES, Registrar, stage_of
from atoll_server.run.watch import Watch
from atoll_server.settings import CoreSettings, RunSettings
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk
from atoll_server.telemetry import entries

log = structlog.get_logger()


class Core(CoreProcess):
    """The process of the registrar. given: the run settings on the command line."""

    run: Registrar

    def __init__(self, settings: CoreSettings, given: dict[str, Any], disk: Disk = DISK, clock: Clock = SYSTEM) -> None:
        super().__init__(settings, disk, clock)
        self._given = given
        count = 0 if settings.registrar_only else settings.shards
        attached = AttachedShards(None if settings.registrar_only else 0, count, clock)
        self.run = Registrar(settings.limits, self.run_clock, self.journal, attached)
        self.watch = Watch(self.run)
        self.datasets = Datasets(self.run, settings.limits)

    async def start(self) -> None:
        await super().start()
        now = self.clock.monotonic()
        self.journal.record(entries.Started(self.run.epoch), now)
        if (begun := self.run.newly_restored()) is not None:
            when = datetime.fromtimestamp(begun.backup_at, UTC).isoformat(timespec="seconds") if begun.backup_at else ""
            restored = entries.Restored(self.run.restored_checkpoint(), begun.generation, when)
            self.journal.record(restored, now)

    async def _restore(self, db: sqlite3.Connection, meta: dict[str, Any], writer: LedgerWriter) -> None:
        self.run.restore(meta, run_ledger.learners(db), writer)
        if "fingerprint" in meta:
            await self.restore_shard(db, meta)
            assert self.run.layout is not None, "`restore_shard` sets it"
            data_ledger.restore(db, self.run.data)
            for lease in self.run.data.leases.values():
                self.run.attached.await_lease(lease.id, lease.learner, lease.incarnation)
            stage = stage_of(self.run.layout, meta["tensors"], bytes.fromhex(self.run.initial_sha256))
            self.run.attached.begin(sh.Begun(stage=stage, settings=self.run.settings.model_dump_json()))
        elif self.settings.init is not None:
            await asyncio.to_thread(open_source, self.settings.init)  # a fault is reported before a learner joins

    def dataset_accounts(self) -> list[Any]:
        return self.datasets.as_data()

    async def _look(self) -> None:
        await super()._look()
        await self.datasets.look()

    def _take_meta(self, db: sqlite3.Connection) -> dict[str, Any]:
        """Increments the epoch and updates the stored run settings with the given ones. Returns all stored values.

        Raises SettingsError if a given setting would change a fixed one or the model does not fit in memory.
        """
        meta = run_ledger.get_meta(db)
        check_startable(meta)
        stored = RunSettings.model_validate(meta.get("settings", {}))
        settled = stored.changed(**self.settings.run_settings(self._given))
        if "fingerprint" in meta and settled.fragments != meta["fragments"]:
            raise SettingsError(
                f"--fragments {settled.fragments}: the run has {meta['fragments']} fragments, which cannot change; "
                "omit the option or start a new run"
            )
        if "fingerprint" in meta and settled.codec != stored.codec:
            raise SettingsError(
                f"--codec {settled.codec.name.lower()}: the run uses {stored.codec.name.lower()}, which cannot change; "
                "omit the option or start a new run"
            )
        self._check_division(meta)
        if reason := too_much(parameters_of(meta), self.settings.memory):
            raise SettingsError(reason)
        if stored.record and not settled.record:
            log.warning("recording is now off: payloads that two snapshots cover will be deleted")
        meta.setdefault("run", uuid.uuid4().hex[:16])
        meta.setdefault("generation", 1)
        meta.setdefault("session_key", secrets.token_bytes(KEY_BYTES).hex())
        meta["epoch"] = meta.get("epoch", 0) + 1
        meta["settings"] = settled.model_dump(mode="json")
        with database.transaction(db):
            for key, value in meta.items():
                run_ledger.put_meta(db, key, value)
        crash_points.point("start.epoch raised")
        return meta

    def _check_division(self, meta: dict[str, Any]) -> None:
        """Restores the data about the other shards from the ledger.

        Raises SettingsError if the division is different.
        """
        stored = meta.get(
            run_ledger.ATTACHED, {"count": 1, "shards": {}, "alone": False}
        )  # the default: no other shards
        settings = self.settings
        wanted = (settings.registrar_only, settings.registrar_only or settings.shards)
        if (stored["alone"], settings.registrar_only or stored["count"]) == wanted:
            self.run.attached.restore(stored)
        elif "fingerprint" in meta:  # before the run begins, the division may change
            count = stored["count"]
            started = "--registrar-only" if stored["alone"] else f"--shard 0/{count}" if count > 1 else "one shard"
            raise SettingsError(
                f"the run was started with {started}, not with these options: use the same options, "
                "or stop all cores and run atoll reshard"
            )

    # ------------------------------------------------------------------------------ attached shards

    def welcome(self, number: int) -> sh.Welcome:
        """Returns the first message to a newly attached shard. number: the shard's number."""
        run = self.run
        snapshots = {} if run.from_manifest is None else run.from_manifest.snapshots
        return sh.Welcome(
            run=run.run_id,
            generation=run.generation,
            epoch=run.epoch,
            secret=run.sessions.secret,
            start=run.sessions.start,
            settings=run.settings.model_dump_json(),
            checkpoint=snapshots.get(number, 0),
        )

    async def save_attached(self) -> None:
        """Makes the addresses and directories of the attached shards durable."""
        attached = self.run.attached
        value = attached.as_data() | {"alone": self.settings.registrar_only}
        await self.run.writer.commit(partial(run_ledger.put_meta, key=run_ledger.ATTACHED, value=value))
