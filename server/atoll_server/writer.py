"""The one thread that writes to the ledger, with group commit.

Whatever is queued goes into one transaction, and each caller is told only after the commit has reached the disk. A
commit that fails ends the process: after a failed fsync nothing that the disk says can be believed.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing

import structlog

GROUP = 256  # operations in one transaction at most

Operation = Callable[[sqlite3.Connection], None]


class LedgerWriter:
    """The one thread that writes. `commit` returns when the operation is on disk."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._queue: queue.SimpleQueue[tuple[Operation, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> None:
        """Begins to take operations."""
        self._thread.start()

    async def commit(self, operation: Operation) -> None:
        """Carries the operation out within the next group and waits until it is durable."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put((operation, done))
        await done

    async def stop(self) -> None:
        """Writes what is queued and closes the database."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        with closing(self._db):
            running = True
            while running:
                group = [self._queue.get()]
                while len(group) < GROUP and not self._queue.empty():
                    group.append(self._queue.get())
                running = None not in group
                entries = [entry for entry in group if entry is not None]
                self._commit([operation for operation, _ in entries])
                for _, done in entries:
                    done.get_loop().call_soon_threadsafe(_resolve, done)

    def _commit(self, operations: Sequence[Operation]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for operation in operations:
                operation(self._db)
            self._db.execute("COMMIT")
        except BaseException:
            # Nothing was acknowledged, and memory may be ahead of the disk: only a restart from the disk is safe.
            structlog.get_logger().critical("ledger write failed: the core stops, restart it", exc_info=True)
            os._exit(70)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
