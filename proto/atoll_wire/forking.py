"""Makes gRPC work in processes that fork, for example to start the workers of a PyTorch data loader.

gRPC's own fork handlers crash a forking process or its children (every time with grpcio 1.85). Without the handlers,
forking works if the children do not use gRPC. gRPC reads the setting once, on its first import. Every package of Atoll
therefore imports this module first. A program that imported grpc before Atoll keeps the handlers, and Atoll refuses
forks there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

SETTING = "GRPC_ENABLE_FORK_SUPPORT"
OFF = frozenset({"0", "f", "false", "n", "no"})

_refusals: list[Exception] = []  # a fork raises the newest error


def switch_off() -> bool:
    """Switches off gRPC's fork handlers, unless the user set SETTING. Returns whether the handlers are still on."""
    if "grpc" not in sys.modules:
        os.environ.setdefault(SETTING, "0")
    return os.environ.get(SETTING, "1").lower() not in OFF


HANDLED = switch_off()  # whether gRPC's handlers run at a fork
_hooked = False


@contextlib.contextmanager
def refused(error: Exception) -> Iterator[None]:
    """Context manager that makes `os.fork` raise this error if gRPC's handlers would run.

    The `subprocess` module can still start programs.
    """
    global _hooked  # noqa: PLW0603 - an audit hook cannot be removed
    if not HANDLED:
        yield
        return
    if not _hooked:
        sys.addaudithook(_audit)  # an error in an audit hook stops the fork; in an at-fork handler it is only printed
        _hooked = True
    _refusals.append(error)
    try:
        yield
    finally:
        _refusals.remove(error)


def _audit(event: str, _: tuple[object, ...]) -> None:
    if _refusals and event in {"os.fork", "os.forkpty"}:
        raise _refusals[-1].with_traceback(None)
