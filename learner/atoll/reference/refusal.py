"""Handles a refusal of `atoll learner` that a restart cannot change: exits, or waits for a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import structlog
from atoll_wire.errors import ExitStatus

from atoll.errors import LearnerError

log = structlog.get_logger()

LOOK_S = 0.5  # seconds between checks, because the kernel may deliver the signal to a thread that does not wait


def handle_refusal(train: Callable[[], None], *, wait: bool) -> None:
    """Calls `train`, and raises the LearnerError that `train` raises.

    wait: whether to wait for SIGTERM or SIGINT before raising, if the error is a refusal by the core.
    """
    refused = None
    try:
        train()
    except LearnerError as error:
        if error.exit_status is not ExitStatus.REFUSED or not wait:
            raise
        refused = LearnerError(str(error), error.exit_status)  # without the traceback, which would keep the model
    if refused is not None:
        came = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # before the log line, because a signal may follow it at once
            signal.signal(number, lambda *_: came.set())
        log.error("refused: this process waits for SIGTERM, and does not train", error=str(refused))
        while not came.wait(LOOK_S):
            pass
        raise refused
