"""The audit log: who joined, who was refused, and what operators did, as JSON lines in a file of bounded size.

Written by a thread of its own; refusals that repeat themselves within a minute are counted.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import structlog

from atoll_server.process import SettingsError

log = structlog.get_logger()

FILE_BYTES, FILES = 16 << 20, 4
WAITING = 4096  # lines; beyond them they are counted only
AGAIN_S = 60.0
KNOWN = 1024  # acts that are watched for repetition


class _Lines(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's
        """The disk is full, or gone: said once for each line, where logs go."""
        log.error("the audit log cannot be written", line=record.getMessage())


class Acts:
    """path: None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._lost = 0
        self._seen: dict[tuple[str, ...], tuple[float, int]] = {}  # when it was written last, and how often since
        self._thread: threading.Thread | None = None
        if path is not None:
            try:
                handler = _Lines(path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8")
            except OSError as error:
                raise SettingsError(f"the audit log {path} cannot be written ({error.strerror})") from error
            self._thread = threading.Thread(target=self._write, args=(handler,), name="audit log", daemon=True)
            self._thread.start()

    def note(self, act: str, **what: str) -> None:
        """Something was done."""
        if self._thread is not None:
            self._put({"act": act, **what})

    def refused(self, act: str, peer: str, **what: str) -> None:
        """Somebody was turned away; again and again, perhaps."""
        if self._thread is None:
            return
        now, place = time.monotonic(), (act, peer.rpartition(":")[0], *what.values())
        at, times = self._seen.get(place, (-AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._seen[place] = (at, times + 1)
            return
        if len(self._seen) >= KNOWN:
            self._settle()
        self._seen[place] = (now, 0)
        line = {"act": act, **what, "peer": peer}
        self._put(line | {"repeated": times} if times else line)

    def _settle(self) -> None:
        """What was only counted is written down, and forgotten."""
        for (act, peer, *what), (_, times) in self._seen.items():
            if times:
                self._put({"act": act, "peer": peer, "what": what, "repeated": times})
        self._seen.clear()

    def _put(self, what: dict[str, Any]) -> None:
        line = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **what}
        if self._lost:
            line["lost_before"] = self._lost
        try:
            self._waiting.put_nowait(line)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Writes what waits."""
        if self._thread is not None:
            self._settle()
            self._waiting.put(None)
            self._thread.join()

    def _write(self, handler: RotatingFileHandler) -> None:
        while (line := self._waiting.get()) is not None:
            handler.emit(logging.makeLogRecord({"msg": json.dumps(line), "levelno": logging.INFO}))
        handler.close()
