"""What `atoll learner` does after a refusal that a restart cannot change."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import structlog

from atoll.errors import RefusedError

log = structlog.get_logger()

LOOK_S = 0.5  # seconds between checks: the kernel may deliver the signal to another thread than the waiting one


def handle_refusal(train: Callable[[], None], *, wait: bool) -> None:
    """Trains. wait: whether to wait for SIGTERM or SIGINT after a refusal. Raises RefusedError after a refusal."""
    refused = None
    try:
        train()
    except RefusedError as error:
        refused = RefusedError(str(error))  # without the traceback, which would keep the model in memory
    if refused is None:
        return
    if wait:
        log.error("refused: this process waits for SIGTERM, and does not train", error=str(refused))
        _wait_for_a_signal()
    raise refused


def _wait_for_a_signal() -> None:
    came = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: came.set())
    while not came.wait(LOOK_S):
        pass
