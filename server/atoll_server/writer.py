"""The one thread that writes to the ledger, with group commit.

Whatever is queued goes into one transaction, and each caller is told only after the commit has reached the disk.
After a commit that failed nothing more is written and nobody is told anything: memory may be ahead of the disk, and
after a failed fsync nothing that the disk says can be believed. Only a restart from the disk is safe.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from atoll_server import crash

GROUP = 256  # operations in one transaction at most

Operation = Callable[[sqlite3.Connection], None]


class LedgerWriter:
    """`commit` returns when the operation is on disk. Made and used on one event loop."""

    def __init__(self, db: sqlite3.Connection, fail: Callable[[BaseException], None]) -> None:
        """fail: is told what could not be written; whoever runs the process ends it then."""
        self._db, self._fail = db, fail
        self._queued: deque[tuple[Operation, asyncio.Future[None]]] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._failed = False
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
            try:
                await loop.run_in_executor(self._thread, self._commit, [operation for operation, _ in group])
            except Exception as error:
                self._failed = True
                self._fail(error)
                return  # with _writing set: nothing is ever taken up again
            for _, done in group:
                if not done.done():
                    done.set_result(None)
        self._writing = None

    def _commit(self, operations: Sequence[Operation]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        crash.point("ledger.transaction begun")
        for operation in operations:
            operation(self._db)
        crash.point("ledger.rows written")
        self._db.execute("COMMIT")
        crash.point("ledger.committed")
