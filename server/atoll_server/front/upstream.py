"""The connections to the core, shared by all learners of a region, and dialled anew when they are dead."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import structlog
from atoll_wire.access import LOCAL, Access
from atoll_wire.frames import FrameStub
from atoll_wire.lanes import Closing
from atoll_wire.links import Link, retire, said

log = structlog.get_logger()

QUICK_CALLS = 48  # on one connection: a core takes 64
MOST_CARRIERS = 64  # connections: who has a slow one has more of them
WATCH_S = 0.5
AGAIN_S = 5.0  # between dialling and dialling again
IDLE_S = 30.0  # before a connection without calls is hung up


@dataclass(eq=False)
class Line:
    """One connection."""

    stub: FrameStub
    channel: Closing
    calls: int = 0
    used_at: float = 0.0


class Trunk:
    """Connections of one kind: each takes `share` calls before there is another, and more when there are `most`."""

    def __init__(self, dial: Callable[[], tuple[FrameStub, Closing]], share: int, most: int) -> None:
        self._dial, self._share, self._most = dial, share, most
        self.lines = list[Line]()

    @contextlib.contextmanager
    def line(self) -> Iterator[Line]:
        """A connection for one call."""
        line = min(self.lines, key=lambda line: line.calls, default=None)
        if line is None or (line.calls >= self._share and len(self.lines) < self._most):
            line = Line(*self._dial())
            self.lines.append(line)
        line.calls += 1
        try:
            yield line
        finally:
            line.calls -= 1
            line.used_at = time.monotonic()

    async def rest(self, now: float) -> None:
        """Hangs up what was not needed for a while."""
        for line in [line for line in self.lines if not line.calls and now - line.used_at > IDLE_S]:
            self.lines.remove(line)
            await line.channel.close()

    async def close(self) -> None:
        """Hangs up; who still waits for an answer sees a CancelledError."""
        for line in self.lines:
            await line.channel.close()


class Upstream:
    """To one core. quick: for what must not wait behind frames; carriers: for uploads; link: for what is fetched."""

    def __init__(
        self,
        address: str,
        access: Access = LOCAL,
        dial: Callable[[str, Access], Link] = Link,
    ) -> None:
        self.address, self._access, self._dial = address, access, dial
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        self.link = self._dial(self.address, self._access)
        self._opened_at, self._suspected = time.monotonic(), False
        self.quick = Trunk(self.link.quick_lane, QUICK_CALLS, 1 << 16)  # as many as the learners that the core takes
        self.carriers = Trunk(self.link.lane, 1, MOST_CARRIERS)

    async def watch(self) -> None:
        """Goes on for ever: dials anew when that is due, and hangs up idle connections."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if self.link.stale or (self._suspected and now - self._opened_at > AGAIN_S):
                why = "new certificates" if self.link.stale else "the core was away"
                log.warning(f"{why}: dialling again", core=self.address)
                self.again()
            self.link.rest()
            for trunk in (self.quick, self.carriers):
                await trunk.rest(now)

    def suspect(self, link: Link) -> None:
        """A call failed with its connection: the others of its time may be dead, too, and nobody said so."""
        self._suspected |= link is self.link

    def again(self) -> None:
        """New connections for whatever begins from now on. What waits on the old ones ends; what moves goes on."""
        quick, carriers, link = self.quick, self.carriers, self.link
        self._open()

        async def close() -> None:
            await quick.close()
            await retire(link)
            await carriers.close()

        self._closing.add(task := asyncio.get_running_loop().create_task(close()))
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Hangs up at once."""
        for task in self._closing:
            task.cancel()
        for trunk in (self.quick, self.carriers):
            await trunk.close()
        await self.link.close()


def lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call failed with its connection: the core did not say so, and nobody here hung up."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not said(error)
