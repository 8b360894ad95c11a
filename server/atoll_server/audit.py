"""What a start has no time to read is read afterwards: the history of a run, and its first parameters."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog
from atoll_wire.errors import UserError

from atoll_server import database, ledger
from atoll_server.disk import Disk
from atoll_server.restore import check_initial
from atoll_server.tensorfile import TensorFile
from atoll_server.writer import LedgerWriter

log = structlog.get_logger()

ROWS = 1000  # at a time
REST = 10.0  # between two times, in lengths of the last one: the ledger has better things to do


class Audit:
    """Of one core process. trouble: what was found; empty: nothing so far."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """path: of the ledger."""
        self._path, self._disk = path, disk
        self._task: asyncio.Task[None] | None = None
        self._ending = threading.Event()
        self.trouble = ""

    def begin(self, writer: LedgerWriter, initial: TensorFile, sha256: str, *, pages: bool) -> None:
        """Reads while the core serves. pages: also those of the ledger, which a start does itself in a small one."""
        self._task = asyncio.create_task(self._read(writer, initial, sha256, pages=pages))

    async def end(self) -> None:
        """Leaves what is still unread for another time."""
        self._ending.set()
        if self._task is not None:
            await self._task

    async def _read(self, writer: LedgerWriter, initial: TensorFile, sha256: str, *, pages: bool) -> None:
        await self._rows(writer)
        await self._ask(partial(check_initial, initial, sha256, self._ending))
        if pages:
            await self._ask(self._pages)

    async def _rows(self, writer: LedgerWriter) -> None:
        number = 0
        while True:
            began = time.monotonic()
            number, wrong = await writer.commit(partial(ledger.read_again, number=number, limit=ROWS))
            if wrong:
                self._say(wrong)
            if not number or self._ending.is_set():
                return
            await asyncio.sleep(REST * (time.monotonic() - began))

    async def _ask(self, check: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(check)
        except (UserError, sqlite3.Error, OSError) as error:
            if not self._ending.is_set() or isinstance(error, UserError):
                self._say(str(error))

    def _pages(self) -> None:
        with contextlib.closing(self._disk.connect(self._path)) as db:
            db.set_progress_handler(self._ending.is_set, 100_000)
            database.check_pages(db, self._path)

    def _say(self, trouble: str) -> None:
        self.trouble = trouble
        log.error("a file is damaged: training goes on, but a restart may fail", error=trouble)
