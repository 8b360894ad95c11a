"""What `atoll learner` does after a refusal that a restart cannot change."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import structlog
from atoll_wire.errors import ExitStatus

from atoll.errors import LearnerError

log = structlog.get_logger()

LOOK_S = 0.5  # seconds between checks: the kernel may deliver the signal to another thread than the waiting one


def handle_refusal(train: Callable[[], None], *, wait: bool) -> None:
    """Trains. wait: whether to wait for SIGTERM or SIGINT after a refusal. Raises LearnerError as `train` does."""
    refused = None
    try:
        train()
    except LearnerError as error:
        if error.exit_status is not ExitStatus.REFUSED or not wait:
            raise
        refused = LearnerError(str(error), error.exit_status)  # without the traceback, which would keep the model
    if refused is not None:
        came = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # before the log line, which may be answered at once
            signal.signal(number, lambda *_: came.set())
        log.error("refused: this process waits for SIGTERM, and does not train", error=str(refused))
        while not came.wait(LOOK_S):
            pass
        raise refused
