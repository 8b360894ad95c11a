"""The connections to the core, shared by all learners of a region, and dialled anew when they are dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import grpc
import structlog
from atoll_wire.access import Access
from atoll_wire.clock import Clock
from atoll_wire.links import Link, retire, said

log = structlog.get_logger()

WATCH_S = 0.5
AGAIN_S = 5.0  # between dialling and dialling again


class Upstream:
    """To one core. link: its connections of now."""

    def __init__(
        self,
        address: str,
        access: Access,
        clock: Clock,
        dial: Callable[[str, Access, Clock], Link] = partial(Link, alert=True),  # noqa: B008 - it is never changed
    ) -> None:
        self.address = address
        self.clock = clock
        self._access = access
        self._dial = dial
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        self.link = self._dial(self.address, self._access, self.clock)
        self._opened_at, self._suspected = self.clock.monotonic(), False

    async def watch(self) -> None:
        """Goes on for ever: dials anew when that is due, and hangs up idle connections."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = self.clock.monotonic()
            if self.link.stale or (self._suspected and now - self._opened_at > AGAIN_S):
                why = "new certificates" if self.link.stale else "the core was away"
                log.warning(f"{why}: dialling again", core=self.address)
                self.again()
            await self.link.rest()

    def suspect(self, link: Link) -> None:
        """A call failed with its connection: the others of its time may be dead, too, and nobody said so."""
        self._suspected |= link is self.link

    def again(self) -> None:
        """New connections for whatever begins from now on. What waits on the old ones ends; what moves goes on."""
        self._closing.add(task := asyncio.get_running_loop().create_task(retire(self.link)))
        self._open()
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Hangs up at once."""
        for task in self._closing:
            task.cancel()
        await self.link.close()


def lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call failed with its connection: the core did not say so, and nobody here hung up."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not said(error)
