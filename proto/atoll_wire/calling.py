"""How a streaming call is opened: it is counted until it has ended, and ends with the block that opened it.

A call that nobody reads or cancels stays open on both sides, and a connection has room for few. gRPC cancels some of
them with the task that waits for them, and none whose task was elsewhere at that moment. `tests/test_tidy.py` sees to
it that there is no other way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio


class Streaming(Protocol):
    """Of gRPC's calls, as far as it is needed here."""

    def cancel(self) -> object:
        """Whoever waits for it sees a CancelledError; one that has ended stays as it ended."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called when it has ended, in whatever way."""


TOLD = ("Fetch", "Follow", "Push", "Report")  # in metrics, also while there are none
C = TypeVar("C", bound=Streaming)

_open = set[tuple[str, Streaming]]()  # of this process; gRPC tells on whatever thread when one has ended


@contextlib.contextmanager
def opened(method: str, call: C) -> Iterator[C]:
    """While it lasts the call may go on; at the end it is cancelled."""
    mine = (method, call)
    _open.add(mine)
    call.add_done_callback(lambda _: _ended(mine))
    try:
        yield call
    finally:
        call.cancel()


def _ended(mine: tuple[str, Streaming]) -> None:
    _open.discard(mine)
    # gRPC's `write` waits for the call's metadata to be sent, and goes on waiting when the call was cancelled, or its
    # channel closed, before there was a connection (seen with 1.76). It looks whether the call has ended once it wakes.
    sent = getattr(mine[1], "_metadata_sent", None)
    if sent is not None:
        sent.set()


def open_calls() -> Counter[str]:
    """Streaming calls of this process that have not ended, by method."""
    return counted(method for method, _ in _open.copy())


def counted(methods: Iterable[str]) -> Counter[str]:
    """How many of each; none of those that are always told."""
    found = Counter(dict.fromkeys(TOLD, 0))
    found.update(methods)
    return found


@contextlib.contextmanager
def until_it_ends() -> Iterator[None]:
    """Around writing: a call that has ended takes nothing more, and reading from it tells why."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.AioRpcError):
        yield
