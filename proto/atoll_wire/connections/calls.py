"""How calls are made: what every call raises, and how a streaming call is opened.

A streaming call is counted until it has ended, and ends with the block that opened it. One that is neither read nor
cancelled stays open on both sides, and a connection has room for few. gRPC cancels some calls with the task that waits
for them, and none whose task was elsewhere at that moment. `tests/test_tidy.py` checks that there is no other way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio


class LinkLost(Exception):  # noqa: N818 - says what happened
    """A call ended with neither an answer nor an error: this process gave its connection up. Try again over another."""


class Streaming(Protocol):
    """The part of gRPC's calls that is needed here."""

    def cancel(self) -> object:
        """Ends the call for this side; a call that has ended stays as it ended."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Called when it has ended, in whatever way."""


ALWAYS_COUNTED = ("Fetch", "Follow", "Push", "Report")  # in metrics, also while there are none
C = TypeVar("C", bound=Streaming)
T = TypeVar("T")

_open = set[tuple[str, Streaming]]()  # of this process; gRPC tells on whatever thread when one has ended


@contextlib.contextmanager
def open_stream(method: str, call: C) -> Iterator[C]:
    """The call may go on inside the block, and is cancelled at its end. The block may raise LinkLost."""
    mine = (method, call)
    _open.add(mine)
    call.add_done_callback(lambda _: _ended(mine))
    try:
        with _losing_the_link():
            yield call
    finally:
        call.cancel()


async def unary_reply(call: Awaitable[T]) -> T:
    """The reply of a call that is not a stream. Raises AioRpcError, and LinkLost."""
    with _losing_the_link():
        return await call


@contextlib.contextmanager
def _losing_the_link() -> Iterator[None]:
    """gRPC raises CancelledError for a cancelled call, as asyncio does for a cancelled task: tells the two apart."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise LinkLost("the connection was given up") from error


def _ended(mine: tuple[str, Streaming]) -> None:
    _open.discard(mine)
    # gRPC's `write` waits for the call's metadata to be sent, and goes on waiting when the call was cancelled, or its
    # channel closed, before there was a connection (seen with 1.76). It looks whether the call has ended once it wakes.
    sent = getattr(mine[1], "_metadata_sent", None)
    if sent is not None:
        sent.set()


def open_calls() -> Counter[str]:
    """Streaming calls of this process that have not ended, by method."""
    return count_by_method(method for method, _ in _open.copy())


def count_by_method(methods: Iterable[str]) -> Counter[str]:
    """How many of each; none of those that are always told."""
    found = Counter(dict.fromkeys(ALWAYS_COUNTED, 0))
    found.update(methods)
    return found


@contextlib.contextmanager
def tolerate_ended_call() -> Iterator[None]:
    """Around writing: a call that has ended takes nothing more, and reading from it tells why."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.AioRpcError):
        yield
