"""The one thread that writes to the ledger, with group commit.

Whatever is queued goes into one transaction, and each caller is told only after the commit has reached the disk.
While the disk is full the same group is tried again: SQLite has taken it back whole, and whoever waits for it waits
longer. After a commit that failed in any other way nothing more is written and nobody is told anything: memory may be
ahead of the disk, and after a failed fsync nothing that the disk says can be believed. Only a restart is safe then.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from atoll_server import crash

log = structlog.get_logger()

GROUP = 256  # operations in one transaction at most
FULL_RETRY_S = 1.0  # between attempts while the disk is full
SLOW_S = 1.0  # a commit that takes longer is worth a word

Operation = Callable[[sqlite3.Connection], None]


class LedgerWriter:
    """`commit` returns when the operation is on disk. Made and used on one event loop."""

    def __init__(self, db: sqlite3.Connection, fail: Callable[[BaseException], None]) -> None:
        """fail: is told what could not be written; whoever runs the process ends it then."""
        self._db, self._fail = db, fail
        self._queued: deque[tuple[Operation, asyncio.Future[None]]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._failed = False
        self.full = False  # the disk is; nothing is acknowledged until there is room
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    async def commit(self, operation: Operation) -> None:
        """Carries the operation out within the next group and waits until it is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queued.append((operation, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="ledger")
        await done

    async def stop(self) -> None:
        """Writes what is queued and closes the database."""
        if self._writing is not None:
            await self._writing
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queued and not self._failed:
            group = [self._queued.popleft() for _ in range(min(GROUP, len(self._queued)))]
            began = time.monotonic()
            try:
                while not await loop.run_in_executor(self._thread, self._commit, [operation for operation, _ in group]):
                    if not self.full:
                        log.error("the disk is full: nothing is acknowledged until there is room; senders wait")
                    self.full = True
                    await asyncio.sleep(FULL_RETRY_S)
            except Exception as error:
                self._failed = True
                self._fail(error)
                return  # with _writing set: nothing is ever taken up again
            took = time.monotonic() - began
            if self.full:
                log.info("the disk has room again", waited_s=round(took, 1))
                self.full = False
            elif took > SLOW_S:
                log.warning("the disk is slow: a commit took long, and acknowledgements with it", took_s=round(took, 1))
            for _, done in group:
                if not done.done():
                    done.set_result(None)
        self._writing = None

    def _commit(self, operations: Sequence[Operation]) -> bool:
        """Whether there was room; if not, nothing was changed."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            crash.point("ledger.transaction begun")
            for operation in operations:
                operation(self._db)
            crash.point("ledger.rows written")
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return False
        crash.point("ledger.committed")
        return True
