"""The error of calls whose connection was closed, and the only function that may open a streaming call.

A streaming call is open, and counted as open, until it ends or its `with` block ends. A call that is neither read nor
cancelled stays open on both sides, and a connection has room for only a few calls. If a task is cancelled, gRPC cancels
only the call that the task is waiting for. `tests/test_tidy.py` checks that all code uses `open_stream`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio


class LinkLost(Exception):  # noqa: N818 - the name says what happened
    """This process closed the call's connection before the call ended. Retry over another connection."""


class Streaming(Protocol):
    """The methods of gRPC calls that this module uses."""

    def cancel(self) -> object:
        """Cancels the call. Does nothing if the call has ended."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Adds a function that gRPC calls when the call has ended for any reason."""


ALWAYS_COUNTED = ("Fetch", "Follow", "Push", "Report")  # methods that metrics show even without open calls
C = TypeVar("C", bound=Streaming)
T = TypeVar("T")

_open = set[tuple[str, Streaming]]()  # open calls of this process; gRPC reports the end of a call on any thread


@contextlib.contextmanager
def open_stream(method: str, call: C) -> Iterator[C]:
    """Context manager for a streaming call, which is cancelled at the end of the block.

    Raises LinkLost if the connection is closed within the block.
    """
    mine = (method, call)
    _open.add(mine)
    call.add_done_callback(lambda _: _ended(mine))
    try:
        with _losing_the_link():
            yield call
    finally:
        call.cancel()


async def unary_reply(call: Awaitable[T]) -> T:
    """Returns the reply of a call that is not a stream. Raises AioRpcError and LinkLost."""
    with _losing_the_link():
        return await call


@contextlib.contextmanager
def _losing_the_link() -> Iterator[None]:
    """Context manager that raises LinkLost if the call was cancelled, but the task was not.

    gRPC raises CancelledError in both cases.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise LinkLost("the connection was closed") from error


def _ended(mine: tuple[str, Streaming]) -> None:
    _open.discard(mine)
    # gRPC's `write` waits until the call's metadata is sent. If the call was cancelled or the channel was closed before
    # a connection existed, `write` keeps waiting (seen with grpcio 1.76). Once woken, it checks whether the call ended.
    sent = getattr(mine[1], "_metadata_sent", None)
    if sent is not None:
        sent.set()


def open_calls() -> Counter[str]:
    """Returns the number of open streaming calls of this process, by method."""
    return count_by_method(method for method, _ in _open.copy())


def count_by_method(methods: Iterable[str]) -> Counter[str]:
    """Returns the number of calls by method, with 0 for methods of ALWAYS_COUNTED that have no calls."""
    found = Counter(dict.fromkeys(ALWAYS_COUNTED, 0))
    found.update(methods)
    return found


@contextlib.contextmanager
def tolerate_ended_call() -> Iterator[None]:
    """Context manager that suppresses errors of writes to an ended call. A later read raises the reason for the end."""
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError, grpc.aio.AioRpcError):
        yield
