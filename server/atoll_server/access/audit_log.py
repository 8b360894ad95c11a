"""The audit log: joins, refusals and operator actions, as JSON lines in files of bounded size.

A separate thread writes the log. If a refusal repeats within a minute, the log counts it instead of writing it again.
LINES_PER_MINUTE limits the lines per learner, and the lines per address and kind of refusal. If the log leaves lines
out, an additional line states their number. Without this limit, one caller could fill the files, and rotation would
delete older lines. Operator actions are exempt from the limit.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import structlog
from atoll_wire.errors import SettingsError
from atoll_wire.process.clock import Clock

log = structlog.get_logger()

FILE_BYTES, FILES = 16 << 20, 4
WAITING = 4096  # limit on lines that wait to be written; the log drops further lines and records their number
AGAIN_S = 60.0
KNOWN = 1024  # limit on the refusals whose repetitions are counted
LINES_PER_MINUTE = 30  # at this rate, the files (64 MiB) hold at least half a day of lines from one source


class _Lines(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's
        """Logs the line that could not be written, for example because the disk is full."""
        log.error("a line could not be written to the audit log: check the disk", line=record.getMessage())


@dataclass(slots=True)
class _Minute:
    """Counts one minute's lines about a learner, or about one kind of refusal to an address.

    began: start of the minute, in monotonic seconds.
    """

    began: float
    lines: int = 0
    left_out: int = 0


class AuditLog:
    """Writes the audit log.

    path: path of the log's file; None to write no log. Lines recorded before `start` are dropped.
    """

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._lost = 0
        self._seen: dict[
            tuple[str, ...], tuple[float, int]
        ] = {}  # when a refusal was last written, and the number of repetitions since then
        self._minutes: dict[str, _Minute] = {}  # by peer or learner
        self._looked_at = clock.monotonic()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread that writes the file. Raises SettingsError if the file cannot be opened."""
        if self._path is None:
            return
        try:
            handler = _Lines(self._path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8")
        except OSError as error:
            raise SettingsError(
                f"the audit log {self._path} cannot be written ({error.strerror}): let this process write there"
            ) from error
        self._thread = threading.Thread(target=self._write, args=(handler,), name="audit log", daemon=True)
        self._thread.start()

    def note(self, act: str, **what: str) -> None:
        """Records an operator action. act: the action's name. what: further fields of the line."""
        if self._thread is not None:
            self._put({"act": act, **what})

    def moved(self, act: str, learner: str, **what: str) -> None:
        """Records that a learner joined or left. Writes no line if the learner has reached LINES_PER_MINUTE."""
        if self._thread is not None and self._fits(f"learner {learner}", self._clock.monotonic()):
            self._put({"act": act, "learner": learner, **what})

    def refused(self, act: str, peer: str, **what: str) -> None:
        """Records a refusal, or counts it if it repeats a recent one. peer: the caller's ADDRESS:PORT.

        If the address has reached LINES_PER_MINUTE for this kind of refusal, the log counts the line as left out.
        """
        if self._thread is None:
            return
        address = peer.rpartition(":")[0]
        now, place = self._clock.monotonic(), (act, address, *what.values())
        at, times = self._seen.get(place, (-AGAIN_S, 0))
        if now - at < AGAIN_S:
            self._seen[place] = (at, times + 1)
            return
        if not self._fits(f"{act} {address}", now):
            return
        if len(self._seen) >= KNOWN:
            self._settle()
        self._seen[place] = (now, 0)
        line = {"act": act, **what, "peer": peer}
        self._put(line | {"repeated": times} if times else line)

    def _fits(self, who: str, now: float) -> bool:
        """Counts a line and returns whether it may be written. who: the learner, or the refusal and address."""
        if now - self._looked_at >= AGAIN_S:
            self._looked_at = now
            self._tell_left_out(now - AGAIN_S)
        minute = self._minutes.setdefault(who, _Minute(now))
        if now - minute.began >= AGAIN_S:
            self._tell_left_out(minute.began)
            minute = self._minutes[who] = _Minute(now)
        if minute.lines >= LINES_PER_MINUTE:
            minute.left_out += 1
            return False
        minute.lines += 1
        return True

    def _tell_left_out(self, until: float) -> None:
        """Writes and deletes the counts of lines left out in the minutes that began at or before `until`."""
        for who, minute in [each for each in self._minutes.items() if each[1].began <= until]:
            if minute.left_out:
                self._put({"act": "left out", "of": who, "lines": minute.left_out})
            del self._minutes[who]

    def _settle(self) -> None:
        """Writes a line for each refusal that has recurred since its last line. Clears the counts."""
        for (act, peer, *what), (_, times) in self._seen.items():
            if times:
                self._put({"act": act, "peer": peer, "what": what, "repeated": times})
        self._seen.clear()

    def _put(self, what: dict[str, Any]) -> None:
        at = datetime.fromtimestamp(self._clock.wall(), UTC)
        line = {"at": at.isoformat(timespec="milliseconds"), **what}
        if self._lost:
            line["lost_before"] = self._lost
        try:
            self._waiting.put_nowait(line)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Writes all waiting lines and ends the thread."""
        if self._thread is not None:
            self._settle()
            self._tell_left_out(math.inf)
            self._waiting.put(None)
            self._thread.join()

    def _write(self, handler: RotatingFileHandler) -> None:
        while (line := self._waiting.get()) is not None:
            handler.emit(logging.makeLogRecord({"msg": json.dumps(line), "levelno": logging.INFO}))
        handler.close()
