"""Verifies the ledger and the initial parameters while the core is serving.

A starting core reads only parts of them.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import structlog
from atoll_wire.errors import UserError
from atoll_wire.process.clock import Clock

from atoll_server.checkpoints.restore import INITIAL, LEDGER, check_initial
from atoll_server.ledger import database, shard_ledger
from atoll_server.storage.disk import Disk

log = structlog.get_logger()

ROWS = 1000  # number of rows read at a time
REST, LONGEST_REST_S = 10.0, 1.0  # pause after a read, as a multiple of the read's duration; longest pause in seconds
MAX_WAIT_S = 1.0  # longest time that `end` waits for the thread, which can finish small files in this time

DAMAGE = (UserError, sqlite3.Error, OSError, TypeError, ValueError)  # a row with a flipped bit may raise the last two


class RunVerifier:
    """Verifies a run's files in a background thread. say: function called with a description of each damaged file."""

    def __init__(self, directory: Path, disk: Disk, clock: Clock, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._disk = disk
        self._clock = clock
        self._say = say
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, initial_sha256: str) -> None:
        """Starts the thread. initial_sha256: hex digest of the initial parameters; empty before they exist."""
        checks = [self._rows, self._pages]
        if initial_sha256:
            checks.append(lambda: check_initial(self._directory / INITIAL, initial_sha256, self._disk, self._ending))
        self._thread = threading.Thread(target=self._read, args=(checks,), name="audit", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stops the verification. The core verifies everything again after its next start."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(MAX_WAIT_S)

    def _read(self, checks: list[Callable[[], None]]) -> None:
        for check in checks:
            try:
                check()
            except DAMAGE as error:
                known = isinstance(error, UserError)
                text = str(error) if known else f"{self._directory} is damaged ({error}): restore a backup"
                text += database.BEFORE_RESTORING
                self._say(text)
                log.error("a file is damaged: training continues, but a restart may fail", error=text)

    def _rows(self) -> None:
        with contextlib.closing(self._disk.connect(self._directory / LEDGER)) as db:
            number = 0
            while True:
                began = self._clock.monotonic()
                number = shard_ledger.read_again(db, number, ROWS)
                if not number or self._ending.wait(min(LONGEST_REST_S, REST * (self._clock.monotonic() - began))):
                    return

    def _pages(self) -> None:
        """Checks all pages of a large ledger. The core has already checked the pages of a small ledger at its start."""
        with contextlib.closing(self._disk.connect(self._directory / LEDGER)) as db:
            if database.large(db) and not self._ending.is_set():
                database.check_pages(db, self._directory / LEDGER)
