"""The errors that every call raises, and the one way to open a streaming call.

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
    """This process closed the call's connection before the core answered. Try again over another connection."""


class Streaming(Protocol):
    """The methods of gRPC's calls that are used here."""

    def cancel(self) -> object:
        """Cancels the call; does nothing if it has ended."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Adds a function that is called when the call has ended, in any way."""


ALWAYS_COUNTED = ("Fetch", "Follow", "Push", "Report")  # methods that metrics show even with no open calls
C = TypeVar("C", bound=Streaming)
T = TypeVar("T")

_open = set[tuple[str, Streaming]]()  # of this process; gRPC reports the end of a call on any thread


@contextlib.contextmanager
def open_stream(method: str, call: C) -> Iterator[C]:
    """Context of a streaming call, which is cancelled at the end of the block. The block may raise LinkLost."""
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
    """Context that raises LinkLost for a cancelled call: gRPC raises CancelledError, as a cancelled task does."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise LinkLost("the connection was closed") from error


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
    """Number of calls by method, with 0 for those of ALWAYS_COUNTED that are missing."""
    found = Counter(dict.fromkeys(ALWAYS_COUNTED, 0))
    found.update(methods)
    return found


@contextlib.contextmanager
def tolerate_ended_call() -> Iterator[None]:
    """Context of writes that ignores the end of the call: reading from the call raises why it ended."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.AioRpcError):
        yield
