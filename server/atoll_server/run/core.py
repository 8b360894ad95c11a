"""A core process from start to stop: its directory, who may join, the first parameters, and then the engine."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from atoll_wire import allocator
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import PROTOCOL
from atoll_wire.errors import SettingsError
from atoll_wire.layout import Layout

from atoll_server.access.audit_log import Acts
from atoll_server.access.refusals import Refused, Status
from atoll_server.checkpoints.restore import LEDGER, Restored, drop_damaged, restore
from atoll_server.learners.registry import Entry, Roster, Speaker, unwanted
from atoll_server.merging import merge
from atoll_server.rounds import events as ev
from atoll_server.run.first_parameters import STAGING
from atoll_server.run.memory_budget import parameters_of, too_much
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import CoreSettings, RunSettings
from atoll_server.shard.engine import Engine
from atoll_server.shard.publications import HappeningLog
from atoll_server.shard.resumption import take_up
from atoll_server.shard.snapshotter import Keeper
from atoll_server.storage import crash_points, database, ledger
from atoll_server.storage.disk import DISK, Disk
from atoll_server.storage.ledger_writer import LedgerWriter, with_room
from atoll_server.storage.rows import LearnerRow
from atoll_server.telemetry.happenings import Diary
from atoll_server.telemetry.metrics import Metrics

log = structlog.get_logger()

T = TypeVar("T")

HOUSEKEEPING_S = 1.0
STANDBY_S = 0.01  # between two looks whether the core that has the directory is gone


class Core:
    """One run in one directory. `given`: run settings from the command line; None means: as the run has it."""

    def __init__(self, settings: CoreSettings, given: dict[str, Any], disk: Disk = DISK) -> None:
        self.settings, self._given, self.disk = settings, given, disk
        self.metrics, self.acts, self.diary = Metrics(), Acts(None), Diary()
        self.roster = Roster(settings.limits.learners)
        self.run_id, self.generation, self.epoch = "", 0, 0
        self.run = RunSettings()
        self.engine: Engine | None = None
        self.keeper: Keeper | None = None
        self.layout: Layout | None = None  # of the run; before the first parameters, of the lease holder
        self.happenings: HappeningLog
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started_at, self.clock = time.monotonic(), RunClock()
        self.frozen_digest, self.initial_sha256 = "", ""
        self.writer: LedgerWriter
        self._unlock: Callable[[], None] | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        self._underway: set[asyncio.Task[Any]] = set()
        self.damage = ""  # of a file, found while it serves
        self.paused = ""  # by whom and why: the run stands
        self.free_bytes: int | None = None  # of the directory's file system, once looked at
        self.restore_s = 0.0  # from the start until it could serve

    # ------------------------------------------------------------------------------ start and stop

    async def take_directory(self) -> None:
        """Warms up, then makes the directory this core's; a standby waits for it as long as another core lives."""
        log.info("preparing kernels: the first start on a machine compiles them, for half a minute")
        await asyncio.to_thread(merge.warm_up)
        allocator.let_go_of_code("libllvmlite")  # 50 MiB that compile nothing any more
        while not await asyncio.to_thread(self._take, self.settings.directory):  # noqa: ASYNC110 - another process
            await asyncio.sleep(STANDBY_S)
        self.started_at, self.clock = time.monotonic(), RunClock()  # a standby may have waited for weeks

    async def start(self) -> None:
        """Takes the directory if that is still to be done, brings the state back, and begins to keep house."""
        directory = self.settings.directory
        if self._unlock is None:
            await self.take_directory()
        db = await with_room(database.open_ledger, directory / LEDGER, self.disk)
        meta = await with_room(self._take_meta, db)
        for row in ledger.learners(db):
            self.roster.restore(row.name, row.region, row.incarnation, row.nonces, row.account, row.evicted)
            self.clock.begin_after(row.account["heard_at"])
        self.roster.since = self.clock.now()
        self.happenings = HappeningLog(self.settings.limits.happenings, self._current)
        self.writer = LedgerWriter(db, self.fail)
        if "fingerprint" in meta:
            restored = await asyncio.to_thread(restore, db, directory, self.disk)
            self.frozen_digest, self.initial_sha256 = meta["frozen_digest"], meta["initial_sha256"]
            dropping = (db, directory, self.generation, restored.snapshots, self.disk)
            damaged = await with_room(drop_damaged, *dropping)
            self.begin(restored, db, damaged=damaged)
        crash_points.point("start.state restored")
        if self.engine is not None:
            for entry in self.roster.entries.values():
                if entry.evicted:  # the process before may have died in the middle of it
                    self.engine.dispatch(ev.Gone(entry.name, unwanted(entry.evicted)))
            self.engine.start()
        self._housekeeping = asyncio.create_task(self._keep_house())
        self._housekeeping.add_done_callback(self.watched)
        self.restore_s = time.monotonic() - self.started_at

    def _take(self, directory: Path) -> bool:
        """Whether it is this core's now. SettingsError when it cannot be, or not without waiting."""
        try:
            for name in ("spool", "snapshots", STAGING):
                self.disk.make_directory(directory / name)
            self._unlock = self.disk.lock(directory / "lock")
            for left in self.disk.files(directory / STAGING):
                self.disk.remove(left)
        except BlockingIOError as error:
            if self.settings.standby:
                return False
            raise SettingsError(
                f"--dir {directory} is in use by another core: stop it, give another directory, or say --standby"
            ) from error
        except OSError as error:
            raise SettingsError(
                f"--dir {directory} cannot be used ({error.strerror}): give a directory that you may write"
            ) from error
        crash_points.point("start.directory taken")
        return True

    def _take_meta(self, db: sqlite3.Connection) -> dict[str, Any]:
        """Reads what the run is, raises the epoch, and settles the settings: stored ones, with the given in place."""
        meta = ledger.get_meta(db)
        if meta.setdefault("protocol", PROTOCOL) != PROTOCOL:
            raise SettingsError(
                f"the run speaks protocol {meta['protocol']}, this core {PROTOCOL}: use the atoll that began it"
            )
        stored = RunSettings.model_validate(meta.get("settings", {}))
        self.run = stored.changed(**self._given)
        if "fingerprint" in meta and self.run.fragments != meta["fragments"]:
            raise SettingsError(
                f"--fragments {self.run.fragments}: the run has {meta['fragments']} and cannot change them"
            )
        if "fingerprint" in meta and self.run.codec != stored.codec:
            raise SettingsError(
                f"--codec {self.run.codec.name.lower()}: the run uses {stored.codec.name.lower()}; begin a new run"
            )
        if reason := too_much(parameters_of(meta.get("tensors", ())), self.settings.memory_bytes):
            raise SettingsError(reason)
        if stored.record and not self.run.record:
            log.warning("the run is not recorded any more: payloads that two snapshots cover are deleted")
        self.run_id = meta.setdefault("run", uuid.uuid4().hex[:16])
        self.generation = meta.setdefault("generation", 1)
        self.paused = meta.get("paused", "")
        self.epoch = meta["epoch"] = meta.get("epoch", 0) + 1
        meta["settings"] = self.run.model_dump(mode="json")
        with database.transaction(db):
            for key, value in meta.items():
                ledger.put_meta(db, key, value)
        crash_points.point("start.epoch raised")
        return meta

    def begin(self, restored: Restored, db: sqlite3.Connection | None, *, damaged: bool = False) -> None:
        self.layout = restored.layout
        engine = Engine(
            self.settings, self.run, self.generation, restored, self.roster, self.happenings, self.writer,
            self.metrics, self.fail, self.disk, self.clock.now,
        )  # fmt: skip
        engine.syncer.paused = bool(self.paused)  # before anything happens
        if db is not None:
            take_up(engine, db, restored, self.clock.now())
        else:
            engine.spool.prepare(self.generation, len(restored.layout.fragments))
            for entry in self.roster.entries.values():
                if not entry.evicted:
                    engine.dispatch(ev.Joined(entry.name, entry.incarnation))
        self.keeper = Keeper(engine, restored.snapshots, damaged=damaged)
        self.engine = engine

    async def stop(self) -> None:
        """A clean end: merges that run are finished, and a snapshot is taken. Raises what cannot be carried through."""
        closing = asyncio.create_task(self._close())
        await asyncio.wait({closing, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            closing.cancel()
            self.failed.result()
        closing.result()

    async def _close(self) -> None:
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        if self.writer.full:
            log.warning("the disk is full: a clean end waits for room; a SIGKILL would lose nothing either")
        if self.engine is not None and self.keeper is not None:
            await self.engine.stop()
            await self.keeper.settled()
            if self.keeper.stale():
                await self._snapshot()
        if self._underway:
            await asyncio.wait(self._underway)
        await self._write_accounts()
        await self.writer.stop()
        assert self._unlock is not None, "it was started"
        self._unlock()

    def underway(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begins work on the directory that goes on when its caller goes away; `stop` waits for it."""
        task = asyncio.create_task(work)
        self._underway.add(task)
        task.add_done_callback(self._underway.discard)
        return task

    def fail(self, error: BaseException) -> None:
        """Acknowledged work cannot be carried through: whoever runs the process ends it."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.clock.look()
            await self._write_accounts()
            if self.engine is not None and self.keeper is not None:
                self.free_bytes = await asyncio.to_thread(self.disk.free_bytes, self.settings.directory)
                self.engine.room(self.free_bytes)
                self.engine.uploads.expire(time.monotonic())
                if self.keeper.due():
                    self.engine.spawn(self._snapshot())

    def watched(self, task: asyncio.Task[None]) -> None:
        """The end of a task that should never end but by being cancelled."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _snapshot(self) -> None:
        assert self.keeper is not None, "a run without parameters has nothing to keep"
        with contextlib.suppress(OSError):  # the keeper has said it
            await self.keeper.take()

    async def _write_accounts(self) -> None:
        rows = [self.row(entry) for entry in self.roster.entries.values() if entry.dirty]
        for entry in self.roster.entries.values():
            entry.dirty = False
        if rows:
            await self.writer.commit(partial(_put_learners, rows=rows))

    def row(self, entry: Entry) -> LearnerRow:
        return LearnerRow(
            entry.name, entry.region, entry.incarnation, entry.nonces, entry.account.as_data(), entry.evicted
        )

    def _current(self) -> pb.Current:
        current = self.engine.current() if self.engine is not None else pb.Current()
        current.paused.reason = self.paused
        return current

    # ------------------------------------------------------------------------------ learners

    def session(self, session: pb.Session) -> Speaker:
        """Whom a call comes from: the one way in for whatever has a session. Raises Refused."""
        if session.run != self.run_id or session.generation != self.generation:
            raise Refused(Status.UNAUTHENTICATED, "the session is of another run or generation: join again")
        return Speaker(self.roster.check(session.learner, session.incarnation, session.token), session.incarnation)

    def versions(self) -> list[int]:
        """Of each fragment; none before the first parameters."""
        return self.engine.versions() if self.engine is not None else []

    def settings_message(self) -> pb.RunSettings:
        """What learners are told of the run's settings."""
        return pb.RunSettings(
            inner_steps=self.run.inner_steps,
            fragments=len(self.layout.fragments) if self.layout is not None else self.run.fragments,
            overlap_steps=self.run.overlap_steps,
            codec=int(self.run.codec),  # type: ignore[arg-type]
            max_staleness=self.run.max_staleness,
            total_tokens=self.run.total_tokens,
        )

    def turned_away(self, refused: Refused, learner: str) -> None:
        """Counts a refusal at the door."""
        self.metrics.contributions.labels("turned_away").inc()
        if self.engine is not None:
            self.engine.contributions.turn_away()
        told = {"learner": learner[:80], "status": refused.status.value, "detail": refused.detail}
        log.warning("contribution turned away", **told)


def _put_learners(db: sqlite3.Connection, rows: list[LearnerRow]) -> None:
    for row in rows:
        ledger.put_learner(db, row)
