"""gRPC in a process that forks, as PyTorch's data loaders do.

gRPC's own fork handlers crash such a process or its children (grpcio 1.85: every time), and it works without them as
long as children leave gRPC alone. gRPC reads the setting once, when it is first imported; so every package of Atoll
imports this module first. A program that imported grpc before Atoll keeps the handlers: there, forks are refused.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

SETTING = "GRPC_ENABLE_FORK_SUPPORT"
OFF = frozenset({"0", "f", "false", "n", "no"})

_refusals: list[Exception] = []  # the newest counts


def switch_off() -> bool:
    """Switches gRPC's fork handlers off, unless the user set the variable. Returns whether they are on all the same."""
    if "grpc" not in sys.modules:
        os.environ.setdefault(SETTING, "0")
    return os.environ.get(SETTING, "1").lower() not in OFF


HANDLED = switch_off()  # gRPC's handlers run at a fork
_hooked = False


@contextlib.contextmanager
def refused(error: Exception) -> Iterator[None]:
    """Within it `os.fork` raises this error, if gRPC's handlers would run. Starting other programs is no such fork."""
    global _hooked  # noqa: PLW0603 - an audit hook is for life
    if not HANDLED:
        yield
        return
    if not _hooked:
        sys.addaudithook(_audit)  # what it raises ends the fork; what an at-fork handler raises is only printed
        _hooked = True
    _refusals.append(error)
    try:
        yield
    finally:
        _refusals.remove(error)


def _audit(event: str, _: tuple[object, ...]) -> None:
    if _refusals and event in {"os.fork", "os.forkpty"}:
        raise _refusals[-1].with_traceback(None)
