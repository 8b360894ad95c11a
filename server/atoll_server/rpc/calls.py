"""Parts of gRPC calls: channel options, interruptible waits, requested frames and the end of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias, TypeVar
from weakref import WeakSet

import grpc
import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.link import ATOLL_STATUS
from atoll_wire.messages import message_parts

from atoll_server.access.refusals import Refused, Status

T = TypeVar("T")
End: TypeAlias = Callable[["Refused"], None]
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def message_options(window_bytes: int, message_bytes: int) -> list[tuple[str, int]]:
    """Returns a gRPC server's channel options: limits, and pings that detect dead peers.

    window_bytes: bytes of a call that gRPC buffers before the server reads them. message_bytes: largest request.
    """
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_parts.REPLY_BYTES),
        ("grpc.so_reuseport", 0),  # otherwise, two servers could listen on the same port
        (
            "grpc.keepalive_time_ms",
            30_000,
        ),  # for idle connections; busy ones detect a lost peer earlier
        ("grpc.keepalive_timeout_ms", 20_000),  # long, since a ping waits behind frames on a slow link
        ("grpc.http2.ping_timeout_ms", 20_000),  # the timeout that applies while frames are in flight
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.server_handshake_timeout_ms", 10_000),  # closes connections that stay silent
        ("grpc.http2.bdp_probe", 0),  # otherwise, gRPC uses more memory per learner on fast links
        ("grpc.http2.lookahead_bytes", window_bytes),
    ]


async def discard_rest(requests: Any) -> None:  # noqa: ANN401 - an asynchronous generator, behind gRPC's iterator
    """Closes a stream of requests before its end. Otherwise, the call would stay open and occupy a slot."""
    await aiter(requests).aclose()


class InterruptibleWait:
    """The waits of one call, which other tasks can interrupt with `end`."""

    def __init__(self) -> None:
        self._why: Refused | None = None
        self._limit: asyncio.Timeout | None = None

    def end(self, why: Refused) -> None:
        """Makes the current wait and all later waits raise a copy of `why`."""
        self._why = self._why or why
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def __call__(self, max_wait_s: float | None = None, late: str = "") -> AsyncIterator[None]:
        """Returns a context manager for one wait. The body must not contain a `yield`, since `end` interrupts the task.

        Raises Refused if `end` was called, or with the message `late` after max_wait_s seconds (None: no time limit).
        """
        self._check()
        try:
            async with asyncio.timeout(max_wait_s) as self._limit:
                yield
        except TimeoutError as error:
            self._check()
            raise Refused(Status.UNAVAILABLE, late) from error
        finally:
            self._limit = None
        self._check()  # the session may have ended just as the wait succeeded

    async def next(self, messages: AsyncIterator[T], max_wait_s: float | None = None, late: str = "") -> T | None:
        """Returns the next message of a stream, or None at the end of the stream. Raises Refused like `__call__`."""
        async with self(max_wait_s, late):
            return await anext(messages, None)

    async def first(self, requests: AsyncIterator[T], what: str) -> T:
        """Returns the first message of a stream. Raises Refused if the stream is empty. what: the stream's name."""
        if (request := await self.next(requests)) is None:
            raise Refused(Status.INVALID_ARGUMENT, f"{what} ended before its first message: send at least one message")
        return request

    def _check(self) -> None:
        if self._why is not None:
            raise Refused(self._why.status, self._why.detail)


class InterruptibleWaits:
    """All waits inside a service's long calls. They end as soon as the service begins to stop."""

    def __init__(self) -> None:
        self._waits = WeakSet[InterruptibleWait]()
        self._why: Refused | None = None

    def begin(self) -> InterruptibleWait:
        """Returns the waits of a new call. If the service has begun to stop, each wait raises Refused."""
        wait = InterruptibleWait()
        if self._why is not None:
            wait.end(self._why)
        self._waits.add(wait)
        return wait

    def end(self, why: str) -> None:
        """Ends all waits with UNAVAILABLE, so that callers try again at this or another server. why: the message."""
        self._why = Refused(Status.UNAVAILABLE, why)
        for wait in list(self._waits):
            wait.end(self._why)


def wanted_frames(request: pb.FetchRequest | pb.ReadRequest, count: int) -> Sequence[int]:
    """Returns the indices of the frames that a Fetch or Read requests. An empty list requests all frames.

    count: number of frames in the fragment. Raises Refused if an index is repeated, out of order or too large.
    """
    if not request.frames:
        return range(count)
    if any(one >= other for one, other in pairwise(request.frames)) or request.frames[-1] >= count:
        text = f"the call requests frames twice, out of order or beyond the {count} existing frames"
        raise Refused(Status.INVALID_ARGUMENT, f"{text}: request each existing frame once, in ascending order")
    return list(request.frames)


_ending: ContextVar[End] = ContextVar("ending", default=lambda _: None)


def may_end(end: End) -> None:
    """Sets the function that ends the current task's call, which `ending` returns."""
    _ending.set(end)


def ending() -> End:
    """Returns the function that ends the current task's call. Without a CallLimiter, the function does nothing."""
    return _ending.get()


async def abort(context: Context, refused: Refused) -> NoReturn:
    """Ends a call with the status and the detail of a refusal."""
    await end(context, grpc.StatusCode[refused.status.name], refused.detail)


async def end(
    context: Context,
    code: grpc.StatusCode,
    details: str,
    *,
    meant: bool = True,
    more: tuple[tuple[str, str | bytes], ...] = (),
) -> NoReturn:
    """Ends a call with a status. details: the message for the caller. more: further trailing metadata.

    meant: whether to mark the status as Atoll's own, so that the caller does not mistake it for a connection failure.
    """
    try:
        await context.abort(code, details, (*(ATOLL_STATUS if meant else ()), *more))
    except Exception as error:
        asyncio.get_running_loop().call_soon(_forget, error)
        raise
    raise AssertionError("abort raises")


def _forget(error: Exception) -> None:
    """Breaks the reference cycle between a call and the error that aborted the call."""
    error.__traceback__ = error.__context__ = None
