"""Turns Python's output to stderr (warnings, tracebacks, other loggers) into one JSON object per line.

Only native code can still write text: for example, a C++ library, or the interpreter during a crash.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from types import TracebackType
from typing import Any

import structlog

log = structlog.get_logger()

FATAL = "the process failed: report this bug"
ERROR = "error: "


def take_over_stderr() -> None:
    """Sends all of Python's output to stderr through structlog. Call it after structlog is configured."""
    sys.stderr = _Lines(sys.stderr.fileno)
    logging.basicConfig(handlers=[_Records()], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    log.error(FATAL, exc_info=(kind, error, trace))


class _Records(logging.Handler):
    """Logs the records of Python's own logging, which libraries use."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


class _Lines(io.TextIOBase):
    """Replaces stderr and logs each line. Lines that begin with "error: " are errors; other lines are warnings."""

    def __init__(self, fileno: Any) -> None:  # noqa: ANN401 - a method of a file
        self._fileno = fileno
        self._parts = threading.local()  # the unfinished line of each thread

    def fileno(self) -> int:
        """Returns the file descriptor of the real stderr, which `faulthandler` needs."""
        number: int = self._fileno()
        return number

    def write(self, text: str) -> int:
        *lines, self._parts.rest = (getattr(self._parts, "rest", "") + text).split("\n")
        for line in filter(str.strip, lines):
            if line.startswith(ERROR):
                log.error(line.removeprefix(ERROR))
            else:
                log.warning(line)
        return len(text)
