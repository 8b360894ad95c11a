"""The connections that carry frames, as many as make a difference.

One TCP connection does not fill a long link that loses packets: its window falls with each loss and grows back by a
packet a round trip. Loss shows as what another connection adds, so that is what is measured: while more of them bring
more, there are more. Where one is as fast as the link, or as this machine, nothing is gained and nothing grows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

FEWEST, MOST = 2, 32
SLOTS = 2  # calls that send over one connection at a time: one sends while the other waits for its answer
WINDOW_S = 1.5  # of sending, over which a rate is taken
GAIN = 1.1  # that twice the connections must bring to be kept
REST_S = 60.0  # before more are tried again
ENOUGH = 150e6  # bytes/s: here the processor is what limits
IDLE_S = 30.0  # without a frame: back to the fewest


class Width:
    """PURE: how many connections there should be, by the rates that were seen."""

    def __init__(self) -> None:
        self.lanes = FEWEST
        self._bytes, self._busy_s = 0, 0.0
        self._before: float | None = None  # the rate with half as many
        self._rested_at = 0.0

    def sent(self, size_bytes: int, busy_s: float, now: float) -> None:
        """So much was sent in so many seconds of sending, over all lanes together."""
        self._bytes += size_bytes
        self._busy_s += busy_s
        if self._busy_s < WINDOW_S:
            return
        rate, self._bytes, self._busy_s = self._bytes / self._busy_s, 0, 0.0
        if self._before is not None and rate < GAIN * self._before:
            self.lanes //= 2
            self._before, self._rested_at = None, now + REST_S
        elif rate < ENOUGH and now >= self._rested_at and self.lanes < MOST:
            self.lanes *= 2
            self._before = rate
        else:
            self._before = None


class Closing(Protocol):
    """A gRPC channel, as far as it is needed here."""

    async def close(self) -> None:
        """Hangs up."""


@dataclass(slots=True, eq=False)
class Lane:
    """One connection. stub: of the calls that go over it; busy: how many send now."""

    stub: Any
    channel: Closing
    busy: int = 0


class Lanes:
    """To one address. dial: a stub and its channel, as a connection of their own."""

    def __init__(self, dial: Callable[[], tuple[Any, Closing]]) -> None:
        self._dial, self._width = dial, Width()
        self._lanes = [Lane(*dial())]
        self._turns, self._capacity = asyncio.Semaphore(SLOTS * FEWEST), SLOTS * FEWEST
        self._moved_at = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def first(self) -> Any:  # noqa: ANN401 - a stub
        """For calls that need no turn."""
        return self._lanes[0].stub

    @property
    def count(self) -> int:
        """How many there should be."""
        return self._width.lanes

    async def take(self) -> Lane:
        """Waits for a turn to send, in the order of asking; `give` it back."""
        await self._turns.acquire()
        lane = min(self._lanes, key=lambda lane: lane.busy)
        if lane.busy and len(self._lanes) < self.count:
            lane = Lane(*self._dial())
            self._lanes.append(lane)
        if not any(each.busy for each in self._lanes):
            self._moved_at = time.monotonic()
        lane.busy += 1
        return lane

    def give(self, lane: Lane) -> None:
        """The turn is over."""
        lane.busy -= 1
        if self._capacity > SLOTS * self.count:
            self._capacity -= 1
        else:
            self._turns.release()

    def moved(self, size_bytes: int) -> None:
        """A frame was handed to a connection."""
        now = time.monotonic()
        self._width.sent(size_bytes, now - self._moved_at, now)
        self._moved_at = now
        while self._capacity < SLOTS * self.count:
            self._capacity += 1
            self._turns.release()

    def rest(self) -> None:
        """Called now and then: hangs up what was not needed for a while."""
        spare = [lane for lane in self._lanes[1:] if not lane.busy]
        if spare and time.monotonic() - self._moved_at > IDLE_S:
            self._width = Width()
            self._lanes = [lane for lane in self._lanes if lane not in spare]
            for lane in spare:
                task = asyncio.get_running_loop().create_task(lane.channel.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Hangs all up."""
        for lane in self._lanes:
            await lane.channel.close()
