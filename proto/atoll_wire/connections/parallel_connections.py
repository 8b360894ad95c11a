"""The connections that carry frames, and how many of them are worth it.

One TCP connection does not fill a long link that loses packets: its window falls with each loss and grows back by a
packet per round trip, and after a pause it begins small. So where round trips are long, the number of connections
grows, unless more of them turn out to be slower. Nearby, one connection is as fast as this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from atoll_wire.connections.calls import LinkLost
from atoll_wire.connections.connection_pool import IDLE_S, Closing, Connection, ConnectionPool
from atoll_wire.messages import frame_messages
from atoll_wire.process.clock import Clock

MIN_CONNECTIONS = 1
FAR_CONNECTIONS = 8  # where round trips are long, at first; more are then tried
MAX_CONNECTIONS = 32
SLOTS = 2  # calls that use one connection at a time: one carries frames while the other waits for its answer
FAR_S, ANSWERS = (
    0.01,
    8,
)  # seconds of a round trip above which windows matter; the shortest of so many answers is the round trip
WINDOW_S, WINDOW_ARRIVALS = 2.0, 6  # a rate needs at least so many seconds of transfer, and so many arrivals
HURT = 0.95  # below this part of the rate with half the connections, there are too many
REST_S = 30.0  # seconds before more are tried again
ENOUGH = 150e6  # bytes/s: above it the CPU is the limit
QUICK_S = 0.25  # a frame that is acknowledged within so many seconds is quick
FIRST_TAKEN_S, SHARE = (
    1.0,
    1 / 8,
)  # seconds until a frame is acknowledged, at first; weight of the newest time in the average


class ConnectionCount:
    """PURE: the number of connections that there should be, from the round trip and measured rates."""

    def __init__(self) -> None:
        self._answers_s: deque[float] = deque(maxlen=ANSWERS)  # only the newest, since a route may change
        self.idle()

    def idle(self) -> None:
        """Returns to the fewest connections, and drops all measured rates, after a time without transfers."""
        self.lanes = MIN_CONNECTIONS
        self._bytes = 0
        self._busy_s = 0.0
        self._arrivals = 0
        self._before: float | None = None  # bytes/s with half as many connections
        self._changed = self._leapt = False  # changed: frames in flight began on the earlier number of connections
        self._rested_at = 0.0

    def answered(self, after_s: float) -> None:
        """Takes in the seconds of an answer that waited behind no frame: the shortest is the round trip."""
        self._answers_s.append(after_s)
        if after_s < FAR_S and self.lanes > MIN_CONNECTIONS:
            self.idle()  # it only seemed far, since both sides were busy
        elif self.far and not self._leapt:
            self.lanes = FAR_CONNECTIONS
            self._changed = True
            self._leapt = True

    @property
    def far(self) -> bool:
        """Whether round trips are known to be so long that windows matter."""
        return len(self._answers_s) == ANSWERS and min(self._answers_s) >= FAR_S

    def arrived(self, size_bytes: int, busy_s: float, now: float) -> None:
        """Takes in an arrival over all connections. busy_s: seconds of transfer for it. now: monotonic seconds."""
        self._bytes += size_bytes
        self._busy_s += busy_s
        self._arrivals += 1
        if self._busy_s < WINDOW_S or self._arrivals < WINDOW_ARRIVALS:
            return
        rate = self._bytes / self._busy_s
        self._bytes = 0
        self._busy_s = 0.0
        self._arrivals = 0
        if self._changed:
            self._changed = False
        elif self._before is not None and rate < HURT * self._before:
            self.lanes //= 2
            self._before = None
            self._rested_at = now + REST_S
        elif self.far and rate < ENOUGH and self.lanes < MAX_CONNECTIONS and now >= self._rested_at:
            self.lanes *= 2
            self._before = rate
            self._changed = True
        else:
            self._before = None


class TransferProgress:
    """The progress of one upload or fetch: a rate is measured only while frames wait to be sent."""

    def __init__(self, lanes: ParallelConnections) -> None:
        self._lanes = lanes
        self._waiting = 0

    def waiting(self, frames: int) -> None:
        """Sets the number of frames that were not given to a connection yet."""
        self._lanes._waits(frames - self._waiting)
        self._waiting = frames

    def arrived(self, size_bytes: int, taken_s: Iterable[float] = ()) -> None:
        """Takes in frames that the other end received. taken_s: seconds from sending to acknowledgement, per frame."""
        self._lanes._arrived(size_bytes, taken_s)


class ParallelConnections:
    """The connections for frames in one direction to one address. dial: returns a stub and its channel."""

    def __init__(self, dial: Callable[[], tuple[Any, Closing]], clock: Clock) -> None:
        self._clock = clock
        self._pool = ConnectionPool(dial, clock, 1, MIN_CONNECTIONS, MIN_CONNECTIONS)
        self._width = ConnectionCount()
        self._turns = asyncio.Semaphore(SLOTS * MIN_CONNECTIONS)
        self._capacity = SLOTS * MIN_CONNECTIONS
        self._arrived_at = 0.0
        self._carrying = 0
        self._waiting = 0
        self._taken_s = FIRST_TAKEN_S  # smoothed, as the next value
        self._off_s = 0.0
        self._given_up = False

    @property
    def count(self) -> int:
        """The number of connections that there should be."""
        return self._width.lanes

    @property
    def together(self) -> int:
        """Frames per message: several on a quick link, where messages cost more; else 1, so that connections share."""
        quick = self._taken_s < QUICK_S and not self._width.far and self.count == MIN_CONNECTIONS
        return frame_messages.FRAMES_PER_MESSAGE if quick else 1

    @property
    def spare(self) -> bool:
        """Whether one of several connections is idle, and no call waits for one."""
        if self._given_up or self.count == MIN_CONNECTIONS or self._turns.locked():
            return False
        connections = self._pool.connections
        return len(connections) < self.count or not all(each.busy for each in connections)

    @property
    def max_wait_s(self) -> float:
        """Seconds to wait for a frame's acknowledgement before it is sent again: the mean, plus the mean deviation.

        It is not shorter, since on a full link a frame that is sent twice delays others.
        """
        return self._taken_s + self._off_s

    async def take(self) -> Connection:
        """Waits for a connection, first come, first served; `give` it back. Raises LinkLost after `give_up`."""
        await self._turns.acquire()
        try:
            if self._given_up:
                raise LinkLost("the connections were closed")
            self._pool.most = self.count
            return self._pool.take()
        except BaseException:
            self._turns.release()
            raise

    def give(self, connection: Connection) -> None:
        """Gives a connection back; the next waiting `take` gets it."""
        self._pool.give(connection)
        if self._capacity > SLOTS * self.count:
            self._capacity -= 1
        else:
            self._turns.release()

    def answered(self, after_s: float) -> None:
        """Takes in how long an answer took that waited behind no frame, in seconds."""
        self._width.answered(after_s)
        self._widen()

    @contextlib.contextmanager
    def carrying(self) -> Iterator[TransferProgress]:
        """Context of an upload or a fetch. It yields the object that takes in the progress."""
        carried = TransferProgress(self)
        self._carrying += 1
        try:
            yield carried
        finally:
            self._carrying -= 1
            carried.waiting(0)

    def _waits(self, more: int) -> None:
        if not self._waiting:
            self._arrived_at = self._clock.monotonic()
        self._waiting += more

    def _arrived(self, size_bytes: int, taken_s: Iterable[float]) -> None:
        now = self._clock.monotonic()
        for each_s in taken_s:
            self._off_s += SHARE * (abs(each_s - self._taken_s) - self._off_s)
            self._taken_s += SHARE * (each_s - self._taken_s)
        if self._waiting:  # else a transfer is ending, and connections are idle
            self._width.arrived(size_bytes, now - self._arrived_at, now)
        self._arrived_at = now
        self._widen()

    def _widen(self) -> None:
        while self._capacity < SLOTS * self.count:
            self._capacity += 1
            self._turns.release()

    async def rest(self) -> None:
        """Closes connections beyond the fewest after IDLE_S seconds without transfers; call it regularly."""
        some = len(self._pool.connections) > MIN_CONNECTIONS
        if some and not self._carrying and self._clock.monotonic() - self._arrived_at > IDLE_S:
            self._width.idle()
            await self._pool.rest(0.0)

    def give_up(self) -> None:
        """Makes every later `take` raise LinkLost: another link replaces this one."""
        self._given_up = True

    async def close(self) -> None:
        """Closes all connections."""
        self.give_up()
        await self._pool.close()
