"""A core that may send any reply, status or endless stream, as seen by a learner's link."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
from atoll_wire.connections.connection_pool import ConnectionPool
from atoll_wire.connections.link import MAX_UPLOADS, Transfers
from atoll_wire.connections.link_speed import LinkSpeed
from atoll_wire.connections.parallel_connections import ParallelConnections
from atoll_wire.process.clock import SYSTEM

from tests.fuzz.mutate import TEXT

ENOUGH = 10_000  # messages after which a stream counts as endless


class Endless(AssertionError):
    """The caller did not cancel an endless stream."""


class Stream:
    """A call that streams the given messages. forever: whether to repeat them without end."""

    def __init__(self, says: list[Any], *, forever: bool) -> None:
        self._says: Iterator[Any] = itertools.cycle(says) if forever and says else iter(says)
        self._given, self._cancelled = 0, False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        self._given += 1
        if self._given > ENOUGH:
            raise Endless
        message = next(self._says, None)
        if message is None or self._cancelled:
            raise StopAsyncIteration
        if isinstance(message, grpc.aio.AioRpcError):
            raise message
        return message

    def add_done_callback(self, _: object) -> None:
        return  # open calls are not counted

    def cancel(self) -> bool:
        self._cancelled = True
        return True


class Taker:
    """An Initialise call that accepts any message."""

    def __init__(self, link: Hostile) -> None:
        self._link = link

    async def write(self, _: Any) -> None:
        await asyncio.sleep(0)

    async def done_writing(self) -> None:
        self._link.uploads += 1

    async def _answer(self) -> None:
        return

    def __await__(self) -> Any:
        return self._answer().__await__()

    def add_done_callback(self, _: object) -> None:
        return

    def cancel(self) -> bool:
        return True


class Hostile:
    """A link to a core that sends the messages in `says`. It stands for both of the link's connections."""

    address = "hostile"
    clock = SYSTEM

    def __init__(self) -> None:
        self.quick = self.offers = self.carriers = ConnectionPool(lambda: (self, self), SYSTEM, 1)
        self.up, self.down = (
            ParallelConnections(lambda: (self, self), SYSTEM),
            ParallelConnections(lambda: (self, self), SYSTEM),
        )
        self.upload_slots = asyncio.Semaphore(MAX_UPLOADS)
        self.transfers = Transfers(SYSTEM)
        self.speed, self.fast = LinkSpeed(None, SYSTEM), False
        self.answered = self.up.answered
        self.says: list[Any] = []
        self.forever = False
        self.joins = self.uploads = 0

    async def tls_fault(self) -> str:
        return ""

    def look(self) -> None:
        """Does nothing: this link has no sockets."""

    async def Join(self, *_: Any, **__: Any) -> Any:
        self.joins += 1
        await asyncio.sleep(0)
        return self._next(last=True)

    def Initialise(self) -> Taker:
        return Taker(self)

    def Follow(self, _: Any) -> Stream:
        return Stream(self.says, forever=self.forever)

    def Fetch(self, _: Any) -> Stream:
        return Stream(self.says, forever=self.forever)

    def Push(self) -> Hostile:
        return self

    async def write(self, _: Any) -> None:
        return

    async def done_writing(self) -> None:
        return

    async def read(self) -> Any:
        return self._next() if self.says else grpc.aio.EOF

    def add_done_callback(self, _: object) -> None:
        return  # open calls are not counted

    def cancel(self) -> bool:
        return True

    async def close(self) -> None:
        return

    def _next(self, *, last: bool = False) -> Any:
        """Returns the next reply. last: whether to repeat the last reply."""
        message = self.says[0] if last and len(self.says) == 1 else self.says.pop(0)
        if isinstance(message, grpc.aio.AioRpcError):
            raise message
        return message


def status(rng: random.Random) -> grpc.aio.AioRpcError:
    """Returns a random status with random details."""
    nothing = grpc.aio.Metadata()
    code = rng.choice([code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
    return grpc.aio.AioRpcError(code, nothing, nothing, details=rng.choice((*TEXT, "a\nb", "\n", None)))
