"""Configures structlog for a process: one event per line on stderr, as text or as JSON."""

from __future__ import annotations

import io
import logging
import sys
from json import dumps
from typing import TextIO, cast

import structlog

from atoll_wire import outer_pb2 as pb
from atoll_wire.errors import UsageError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Lossy(io.TextIOBase):
    """A log file that drops lines on write errors (full disk, closed pipe), so that the process continues."""

    def __init__(self, file: TextIO, *, json: bool) -> None:
        self._file = file
        self._json = json
        self._lost = 0

    def write(self, text: str) -> int:
        try:
            if self._lost:
                said = f"{self._lost} lines of this log were lost because of write errors: check the disk"
                self._file.write(f"{dumps({'event': said, 'level': 'error'}) if self._json else said}\n")
            self._file.write(text)
            self._file.flush()
            self._lost = 0
        except (OSError, ValueError):  # ValueError: the file was closed
            self._lost += 1
        return len(text)


def contribution_name(session: pb.Session, fragment: int, seq: int) -> str:
    """Returns a contribution's name in the logs of learners, fronts and cores. It equals `str(Key)`."""
    return f"{session.learner}/{session.incarnation}/{fragment}/{seq}"


def configure_unless() -> None:
    """Configures logging, unless the user's process has already done so.

    Without configuration, structlog would print all levels to stdout.
    """
    if not structlog.is_configured():
        configure("info", json=False)


def configure(level: str, *, json: bool) -> None:
    """Sets the level and the format. Raises UsageError for an unknown level."""
    if level not in LEVELS:
        raise UsageError(f"--log-level {level} is not a log level: use one of {', '.join(LEVELS)}")
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Lossy(sys.stderr, json=json))),
    )
