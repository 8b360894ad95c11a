"""Logs that kernels are being compiled, because the first start on a machine then takes half a minute longer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import structlog
from numba.core import event

log = structlog.get_logger()

MESSAGE = "compiling kernels: this takes about half a minute, once per machine"


@contextlib.contextmanager
def compiling_is_logged() -> Iterator[None]:
    """Context manager that logs MESSAGE once, as soon as numba compiles a kernel of Atoll that is not in its cache."""
    with event.install_listener("numba:compile", _Listener()):
        yield


class _Listener(event.Listener):
    """Receives numba's compiler events in the compiling thread. Loading a kernel from the cache causes no event."""

    def __init__(self) -> None:
        self._said = False

    def on_start(self, event: Any) -> None:  # noqa: ANN401
        """Logs MESSAGE before the first kernel of Atoll is compiled. Ignores functions of a training script."""
        if not self._said and event.data["dispatcher"].py_func.__module__.startswith("atoll"):
            self._said = True
            log.info(MESSAGE)

    def on_end(self, event: Any) -> None:  # noqa: ANN401
        """Does nothing. Numba requires this method."""
