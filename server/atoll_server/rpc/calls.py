"""What every gRPC call needs: the channel's limits, the first message of a stream, an end in time, and a good one."""

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
from atoll_wire import parts
from atoll_wire.links import SAID

from atoll_server.access.refusals import Refused, Status

T = TypeVar("T")
End: TypeAlias = Callable[["Refused"], None]
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def message_options(window_bytes: int, message_bytes: int) -> list[tuple[str, int]]:
    """Of the server's channel: limits on what it takes, and how it finds out that a peer is gone."""
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", parts.REPLY_BYTES),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a lottery
        ("grpc.keepalive_time_ms", 30_000),  # for what nobody waits for: arrivals tell much earlier
        ("grpc.keepalive_timeout_ms", 20_000),  # a ping stands behind the frames of a slow link
        ("grpc.http2.ping_timeout_ms", 20_000),  # the one that counts where frames are on their way
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.server_handshake_timeout_ms", 10_000),  # who says nothing has to go
        ("grpc.http2.bdp_probe", 0),  # a window that grows with the link would be memory that grows with learners
        ("grpc.http2.lookahead_bytes", window_bytes),
    ]


async def let_go(requests: Any) -> None:  # noqa: ANN401 - an asynchronous generator, behind gRPC's iterator
    """Ends a stream that was not read to its end: gRPC's reader holds itself and its call, of a connection's few."""
    await aiter(requests).aclose()


class Wait:
    """What one call waits for, until it is told to end."""

    def __init__(self) -> None:
        self._why: Refused | None = None
        self._limit: asyncio.Timeout | None = None

    def end(self, why: Refused) -> None:
        """Whatever it waits for now or later raises this, made anew."""
        self._why = self._why or why
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def __call__(self, patience_s: float | None = None, late: str = "") -> AsyncIterator[None]:
        """Around one wait, never around a `yield`: what it interrupts is the task. Raises Refused; late: what for."""
        self._check()
        try:
            async with asyncio.timeout(patience_s) as self._limit:
                yield
        except TimeoutError as error:
            self._check()
            raise Refused(Status.UNAVAILABLE, late) from error
        finally:
            self._limit = None
        self._check()  # what came at the same moment is of a session that is over

    async def next(self, messages: AsyncIterator[T], patience_s: float | None = None, late: str = "") -> T | None:
        """A stream's next message; None at its end. Raises Refused."""
        async with self(patience_s, late):
            return await anext(messages, None)

    async def first(self, requests: AsyncIterator[T], what: str) -> T:
        """A stream's first message. Raises Refused when there is none."""
        if (request := await self.next(requests)) is None:
            raise Refused(Status.INVALID_ARGUMENT, f"{what} begins with a header: none came")
        return request

    def _check(self) -> None:
        if self._why is not None:
            raise Refused(self._why.status, self._why.detail)


class Waits:
    """Those of a service's calls that may last: they end when it stops, in a moment instead of its whole grace."""

    def __init__(self) -> None:
        self._waits = WeakSet[Wait]()
        self._why: Refused | None = None

    def begin(self) -> Wait:
        """For one call."""
        wait = Wait()
        if self._why is not None:
            wait.end(self._why)
        self._waits.add(wait)
        return wait

    def end(self, why: str) -> None:
        """The service stops: who called comes back, here or elsewhere."""
        self._why = Refused(Status.UNAVAILABLE, why)
        for wait in list(self._waits):
            wait.end(self._why)


def wanted_frames(request: pb.FetchRequest, count: int) -> Sequence[int]:
    """The frames that a Fetch asks for, of `count` that there are. Raises Refused."""
    if not request.frames:
        return range(count)
    if any(one >= other for one, other in pairwise(request.frames)) or request.frames[-1] >= count:
        text = f"Fetch asks for frames that are not ascending, or not among the {count} of fragment {request.fragment}"
        raise Refused(Status.INVALID_ARGUMENT, f"{text}: ask for each once, in order")
    return list(request.frames)


_ending: ContextVar[End] = ContextVar("ending", default=lambda _: None)


def may_end(end: End) -> None:
    """The gate says how the call of this task is ended, whatever it waits for: its reader, too."""
    _ending.set(end)


def ending() -> End:
    """How it is; what this gives does nothing where there is no gate."""
    return _ending.get()


async def abort(context: Context, refused: Refused) -> NoReturn:
    """Ends a call with what was refused."""
    await end(context, grpc.StatusCode[refused.status.name], refused.detail)


async def end(context: Context, code: grpc.StatusCode, details: str, *, meant: bool = True) -> NoReturn:
    """Ends a call with a status. The mark tells learners and fronts that it was meant, and the connection is well."""
    try:
        await context.abort(code, details, SAID if meant else ())
    except Exception as error:
        asyncio.get_running_loop().call_soon(_forget, error)
        raise
    raise AssertionError("abort raises")


def _forget(error: Exception) -> None:
    """The call holds the error that it was aborted with: that must not hold the call."""
    error.__traceback__ = error.__context__ = None
