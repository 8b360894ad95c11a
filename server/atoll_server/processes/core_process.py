"""A core process from start to stop, with its directory, its copy of the run and its shard.

`core` is the process of the registrar. `shard_core` is a process with only a shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from atoll_wire.codec.compiling import compiling_is_logged
from atoll_wire.contract import PROTOCOL
from atoll_wire.errors import SettingsError
from atoll_wire.process import allocator
from atoll_wire.process.certificate_expiry import CertificateExpiry, expiry_times
from atoll_wire.process.clock import Clock

from atoll_server.checkpoints.restore import LEDGER, RESTORING, Origin, Restored, drop_damaged, restore
from atoll_server.learners.learner_registry import refuse_reason
from atoll_server.ledger import database, run_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter, with_room
from atoll_server.merging import merge
from atoll_server.rounds import syncer_events as ev
from atoll_server.run.initial_parameters import STAGING
from atoll_server.run.known_run import KnownRun
from atoll_server.run.run_clock import RunClock
from atoll_server.run.troubles import shard_troubles
from atoll_server.settings import CoreSettings
from atoll_server.shard.shard import Shard
from atoll_server.shard.shard_restore import restore_shard
from atoll_server.shard_context.context import ShardContext
from atoll_server.storage import crash_points
from atoll_server.storage.disk import Disk
from atoll_server.telemetry.events import EventLog
from atoll_server.telemetry.journal import Journal
from atoll_server.telemetry.logs import JournalLog
from atoll_server.telemetry.metrics import Metrics
from atoll_server.telemetry.timeline import Timeline

log = structlog.get_logger()

T = TypeVar("T")

HOUSEKEEPING_S = 1.0
STANDBY_S = 0.01  # interval at which a standby checks whether the active core has ended


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """Facts about a core process at one moment.

    started_at: start time in monotonic seconds. restore_s: seconds from locking the directory until the core could
    serve. free_bytes: free space of the directory's file system; None until measured. damage: description of a file
    that was found damaged while the core was serving; empty if there is none.
    """

    started_at: float
    restore_s: float
    free_bytes: int | None
    damage: str


def check_startable(meta: dict[str, Any]) -> None:
    """Sets the protocol version of a new run. Raises SettingsError if a core must not start from this directory.

    A core must not start if the run uses a different protocol version or `atoll reshard` has moved the run.
    """
    if moved := meta.get(run_ledger.MOVED):
        raise SettingsError(
            f"the run was moved to {moved} by atoll reshard: start cores from the directories there (if {moved} does "
            "not exist, repeat the interrupted command)"
        )
    if meta.setdefault("protocol", PROTOCOL) != PROTOCOL:
        raise SettingsError(
            f"the run uses protocol {meta['protocol']}, but this core uses {PROTOCOL}: "
            "use the version that started the run"
        )


class CoreProcess(ABC):
    """A core process with one shard. run: the run as this process knows it."""

    run: KnownRun

    def __init__(self, settings: CoreSettings, disk: Disk, clock: Clock) -> None:
        self.settings = settings
        self.disk = disk
        self.clock = clock
        self.metrics = Metrics()
        self.metrics.registry.register(CertificateExpiry(partial(expiry_times, settings.security)))
        self.journal = Journal()
        self.run_clock = RunClock(clock)
        self.timeline = Timeline(self.metrics)
        self.events = EventLog(self.run_clock.at)
        for subscriber in (self.metrics.on, self.timeline.on, self.events.on, JournalLog().on):
            self.journal.subscribe(subscriber, only_shows=True)
        self.failed: asyncio.Future[None]  # created by `take_directory`; its exception ends this process
        self._started_at = clock.monotonic()
        self._restore_s = 0.0
        self._free_bytes: int | None = None
        self._damage = ""
        self._unlock: Callable[[], None] | None = None
        self._housekeeping: asyncio.Task[None] | None = None
        self._underway: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------------------------ start and stop

    async def take_directory(self) -> None:
        """Compiles the kernels, then locks the directory. A standby waits until the other core releases the lock.

        Raises SettingsError if the directory cannot be used.
        """
        self.failed = asyncio.get_running_loop().create_future()
        with compiling_is_logged():
            await asyncio.to_thread(merge.warm_up)
        allocator.drop_library_pages("libllvmlite")  # 65 MB of the compiler, which is no longer needed
        while not await asyncio.to_thread(self._take, self.settings.directory):  # noqa: ASYNC110 - another process
            await asyncio.sleep(STANDBY_S)
        self._started_at = self.clock.monotonic()
        self.run_clock.set()  # the machine's clock may have been set while a standby waited

    async def start(self) -> None:
        """Locks the directory unless this process already holds the lock.

        Then restores the run and starts its tasks.
        """
        if self._unlock is None:
            await self.take_directory()
        db = await with_room(database.open_ledger, self.settings.directory / LEDGER, self.disk)
        meta = await with_room(self._take_meta, db)
        writer = LedgerWriter(db, self.fail, self.clock)
        writer.start()
        await self._restore(db, meta, writer)
        crash_points.point("start.state restored")
        if (shard := self.run.shard) is not None:
            for entry in self.run.registry.entries.values():
                if entry.evicted:  # the previous core may have died during the eviction
                    shard.dispatch(ev.Left(entry.name, refuse_reason(entry.evicted)))
            shard.start()
        self._housekeeping = asyncio.create_task(self._keep_house())
        self._housekeeping.add_done_callback(self.watched)
        self._restore_s = self.clock.monotonic() - self._started_at

    @abstractmethod
    def _take_meta(self, db: sqlite3.Connection) -> dict[str, Any]:
        """Begins a new epoch in the ledger and returns the run's values. Raises SettingsError."""

    @abstractmethod
    async def _restore(self, db: sqlite3.Connection, meta: dict[str, Any], writer: LedgerWriter) -> None:
        """Restores the run and its shard from the ledger."""

    async def restore_shard(self, db: sqlite3.Connection, meta: dict[str, Any]) -> None:
        """Restores this process's shard of a run that has parameters."""
        directory = self.settings.directory
        restored = await asyncio.to_thread(restore, db, Origin.of(meta), directory, self.disk, self.clock)
        damaged = await with_room(drop_damaged, db, directory, restored, self.disk)
        shard = self._shard(restored, damaged=damaged)
        restore_shard(shard, db, restored)
        self.run.runs(restored.layout, shard)

    def begin(self, restored: Restored) -> None:
        """Creates and starts this process's shard. Called when the initial parameters are durable."""
        shard = self._shard(restored, damaged=False)
        shard.spool.prepare(self.run.generation, shard.fragments)
        shard.start()
        for entry in self.run.registry.entries.values():
            if not entry.evicted:
                shard.dispatch(ev.Joined(entry.name, entry.incarnation))
        self.run.runs(restored.layout, shard)

    def facts(self) -> CoreFacts:
        return CoreFacts(self._started_at, self._restore_s, self._free_bytes, self._damage)

    def troubles(self) -> list[str]:
        """Returns the current problems of this process and its shard, one line each."""
        return [each.text for each in shard_troubles(self.run, self._damage, self.clock.monotonic())]

    def damaged(self, what: str) -> None:
        """Records that a file was found damaged while the core was serving. what: description for operators."""
        self._damage = what

    def _take(self, directory: Path) -> bool:
        """Prepares and locks the directory. Returns False if this core is a standby and another core holds the lock.

        Raises SettingsError if the directory cannot be used.
        """
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
                f"--dir {directory} is in use by another core: stop that core, give another --dir, or add --standby"
            ) from error
        except OSError as error:
            raise SettingsError(
                f"--dir {directory} cannot be used ({error.strerror}): give a directory that you may write to"
            ) from error
        if self.disk.exists(directory / RESTORING):
            self._unlock()
            raise SettingsError(
                f"--dir {directory} is incomplete (a restore of a backup was interrupted): run the restore again"
            )
        crash_points.point("start.directory taken")
        return True

    def _shard(self, restored: Restored, *, damaged: bool) -> Shard:
        run = self.run
        context = ShardContext(
            settings=self.settings,
            run=run.settings,
            generation=run.generation,
            number=run.number,
            shards=run.shards,
            registry=run.registry,
            journal=run.journal,
            writer=run.writer,
            metrics=self.metrics,
            disk=self.disk,
            clock=run.clock,
            fail=self.fail,
            datasets=self.dataset_accounts,
        )
        return Shard(context, restored, run.view(), damaged=damaged)

    def dataset_accounts(self) -> list[Any]:
        """Returns the accounts of the datasets, for a checkpoint. Only the registrar's process has any."""
        return []

    async def stop(self) -> None:
        """Stops the core cleanly: waits for running merges, then takes a snapshot if the newest one lacks any merge.

        Raises the error that was passed to `fail` or an error that occurs during the shutdown.
        """
        closing = asyncio.create_task(self._close())
        await asyncio.wait({closing, self.failed}, return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            closing.cancel()
            self.failed.result()
        closing.result()

    async def _close(self) -> None:
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        writer = self.run.writer
        if writer.full:
            log.warning("the disk is full: a clean stop waits for free space; SIGKILL would lose no acknowledged work")
        if (shard := self.run.shard) is not None:
            await shard.stop()
            await shard.snapshots.settled()
            if shard.snapshots.stale():
                await self._snapshot(shard)
        if self._underway:
            await asyncio.wait(self._underway)
        await self.run.save_accounts()
        await writer.stop()
        assert self._unlock is not None, "`start` locked the directory"
        self._unlock()

    def underway(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that continues even if its caller is cancelled. `stop` waits for the task to end."""
        task = asyncio.create_task(work)
        self._underway.add(task)
        task.add_done_callback(self._underway.discard)
        return task

    def fail(self, error: BaseException) -> None:
        """Ends the process with this error."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.run_clock.look()
            await self._look()
            if (shard := self.run.shard) is not None:
                self._free_bytes = await asyncio.to_thread(self.disk.free_bytes, self.settings.directory)
                shard.room(self._free_bytes)
                shard.uploads.expire(self.clock.monotonic())
                if shard.snapshots.due():
                    shard.work.spawn(self._snapshot(shard))

    async def _look(self) -> None:
        """Makes all changes since the last call durable. Called every HOUSEKEEPING_S seconds."""
        await self.run.save_accounts()

    def watched(self, task: asyncio.Task[None]) -> None:
        """Ends the process if `task` failed. Used as a done callback of tasks that run until they are cancelled."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _snapshot(self, shard: Shard) -> None:
        with contextlib.suppress(OSError):  # the snapshotter has recorded the error
            await shard.snapshots.take()
