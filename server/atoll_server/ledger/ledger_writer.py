"""Writes to the ledger in a single thread, with group commit.

A transaction contains up to GROUP queued operations. `commit` returns only after its transaction is on the disk.

While the disk is full, the writer repeats the same transaction, which SQLite has rolled back, and the callers keep
waiting. After any other failure, nothing more is written and no `commit` returns, since memory may be ahead of the
disk. After a failed fsync, even reads from the disk cannot be trusted, so only a restart is safe.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import structlog
from atoll_wire.process.clock import Clock

from atoll_server.ledger import database
from atoll_server.storage import crash_points

log = structlog.get_logger()

GROUP = 256  # limit on the operations in one transaction
FULL_RETRY_S = 1.0  # seconds between attempts while the disk is full
SLOW_S = 1.0  # commits that take longer than this are logged

P = ParamSpec("P")
T = TypeVar("T")


async def with_room(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` in a thread during a core's start. Repeats `work` while the disk is full. Returns the result."""
    said = False
    while True:
        try:
            return await asyncio.to_thread(work, *args, **kwargs)
        except sqlite3.OperationalError as error:
            if not database.no_room(error):
                raise
            if not said:
                log.error("the disk is full: this core starts when you free space", error=str(error))
            said = True
            await asyncio.sleep(FULL_RETRY_S)


class LedgerWriter:
    """Commits operations to the ledger. Must be used on one event loop, between `start` and `stop`."""

    def __init__(self, db: sqlite3.Connection, fail: Callable[[BaseException], None], clock: Clock) -> None:
        """fail: function that ends the process with the error of a failed commit."""
        self._db = db
        self._fail = fail
        self._clock = clock
        self._queued: deque[tuple[Callable[[sqlite3.Connection], Any], asyncio.Future[Any]]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self.full = False  # whether the disk is full; if so, no work is acknowledged
        self._thread: ThreadPoolExecutor  # set by `start`

    def start(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    async def commit(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Runs an operation in the next transaction. Returns the operation's result once the transaction is durable.

        While the disk is full, the operation is repeated, so it may change only the ledger.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queued.append((operation, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="ledger")
            self._writing.add_done_callback(self._written)
        return await done

    async def stop(self) -> None:
        """Commits all queued operations, then closes the database."""
        if self._writing is not None:
            await self._writing
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queued:
            group = [self._queued.popleft() for _ in range(min(GROUP, len(self._queued)))]
            began = self._clock.monotonic()
            operations = [operation for operation, _ in group]
            while (results := await loop.run_in_executor(self._thread, self._commit, operations)) is None:
                if not self.full:
                    log.error("the disk is full: nothing is acknowledged, and senders wait, until you free space")
                self.full = True
                await asyncio.sleep(FULL_RETRY_S)
            took = self._clock.monotonic() - began
            if self.full:
                log.info("the disk has free space again", waited_s=round(took, 1))
                self.full = False
            elif took > SLOW_S:
                log.warning("the disk is slow: a commit delayed acknowledgements", took_s=round(took, 1))
            for (_, done), result in zip(group, results, strict=True):
                if not done.done():
                    done.set_result(result)
        self._writing = None

    def _written(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:  # leaves _writing set, so that no later group is written
            self._fail(error)

    def _commit(self, operations: Sequence[Callable[[sqlite3.Connection], Any]]) -> list[Any] | None:
        """Returns the result of each operation, or None if the disk was full and no row changed."""
        try:
            with database.transaction(self._db):
                crash_points.point("ledger.transaction begun")
                results = [operation(self._db) for operation in operations]
                crash_points.point("ledger.rows written")
        except sqlite3.OperationalError as error:
            if not database.no_room(error):
                raise
            return None
        crash_points.point("ledger.committed")
        return results
