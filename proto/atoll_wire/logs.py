"""structlog, set up once for a process, learner and core alike: one event a line on stderr, for people or as JSON."""

from __future__ import annotations

import logging
import sys

import structlog

from atoll_wire.errors import UserError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(level: str, *, json: bool) -> None:
    """Sets the level and the form. UserError for a level that does not exist."""
    if level not in LEVELS:
        raise UserError(f"--log-level {level}: use one of {', '.join(LEVELS)}")
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
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
