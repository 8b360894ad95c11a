"""The connections that carry frames, and the choice of their number.

One TCP connection does not fill a long link that loses packets. Its window shrinks with each loss, grows by one packet
per round trip, and starts small after a pause. The number of connections therefore grows if round trips are long,
unless more connections prove slower. On a short link, one connection is enough, because the CPU is the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from atoll_wire.connections.calls import LinkLost
from atoll_wire.connections.connection_pool import IDLE_S, Closing, Connection, ConnectionPool
from atoll_wire.messages import frame_messages
from atoll_wire.process.clock import Clock

MIN_CONNECTIONS = 1
FAR_CONNECTIONS = 8  # initial number of connections if round trips are long; more are tried later
MAX_CONNECTIONS = 32
SLOTS = 2  # concurrent calls per connection: one call sends frames while the other waits for its answer
FAR_S = 0.01  # a link is long if all the newest round trips took at least this many seconds
FEWEST, NEWEST = 8, 32  # number of round trips for this: normally, and if the kernel's round trip is short
STEADY_S = 4.0  # FEWEST are enough in any case if they took this many seconds, longer than processes are busy
WINDOW_S, WINDOW_ARRIVALS = 2.0, 6  # a rate needs at least this many seconds of transfer and this many arrivals
HURT = 0.95  # the number of connections is halved if the rate falls below this fraction of the rate with half as many
REST_S = 30.0  # seconds before more connections are tried again
ENOUGH = 150e6  # bytes/s; above this rate the CPU is the limit
QUICK_S = 0.25  # frames are quick if their acknowledgement takes less than this many seconds
FIRST_TAKEN_S, SHARE = 1.0, 1 / 8  # first estimate of the seconds to an acknowledgement; weight of the newest time


class ConnectionCount:
    """PURE: chooses the number of connections from the round trip and measured rates."""

    def __init__(self) -> None:
        self._answers_s: deque[float] = deque(maxlen=NEWEST)  # only the newest, because a route may change
        self._enough = FEWEST
        self._short_at = -math.inf  # when the newest short round trip was measured
        self.idle()

    def idle(self) -> None:
        """Resets the number of connections and drops all measured rates, after a time without transfers."""
        self.lanes = MIN_CONNECTIONS
        self._bytes = 0
        self._busy_s = 0.0
        self._arrivals = 0
        self._before: float | None = None  # bytes/s with half as many connections
        self._changed = self._leapt = False  # changed: the count changed while some frames were in flight
        self._rested_at = 0.0

    def answered(self, after_s: float, now: float, kernel_s: float | None = None) -> None:
        """Records a response time. The shortest response time is the round trip.

        after_s: seconds until an answer that did not wait behind a frame. now: monotonic seconds. kernel_s: the
        kernel's round trip in seconds, or None if it is unknown. If only the kernel's is short, the processes are busy,
        a proxy is near, or the route has changed.
        """
        self._answers_s.append(after_s)
        if after_s < FAR_S or len(self._answers_s) == 1:
            self._short_at = now
        if kernel_s is not None and kernel_s >= FAR_S:
            self._enough = 1
        else:
            self._enough = NEWEST if kernel_s is not None and now - self._short_at < STEADY_S else FEWEST
        if after_s < FAR_S and self.lanes > MIN_CONNECTIONS:
            self.idle()  # earlier round trips seemed long only because the two processes were busy
        elif self.far and not self._leapt:
            self.lanes = FAR_CONNECTIONS
            self._changed = True
            self._leapt = True

    @property
    def round_trip_s(self) -> float:
        """The shortest of the newest response times, in seconds; 0 if there are none."""
        return min(self._answers_s, default=0.0)

    @property
    def far(self) -> bool:
        """Whether round trips are so long that TCP windows limit the rate."""
        newest = list(self._answers_s)[-self._enough :]
        return len(newest) == self._enough and min(newest) >= FAR_S

    def arrived(self, size_bytes: int, busy_s: float, now: float) -> None:
        """Records that frames arrived over one of the connections.

        busy_s: transfer time in seconds. now: monotonic seconds.
        """
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
    """The progress of one upload or fetch. A rate is measured only while frames wait to be sent."""

    def __init__(self, lanes: ParallelConnections) -> None:
        self._lanes = lanes
        self._waiting = 0

    def waiting(self, frames: int) -> None:
        """Sets the number of frames that no connection has taken yet."""
        self._lanes._waits(frames - self._waiting)
        self._waiting = frames

    def arrived(self, size_bytes: int, taken_s: Iterable[float] = ()) -> None:
        """Records frames that arrived. taken_s: in an upload, seconds until the acknowledgement of each frame."""
        self._lanes._arrived(size_bytes, taken_s)


class ParallelConnections:
    """The connections for frames in one direction to one address.

    dial: function that opens a connection and returns its stub and channel.
    """

    def __init__(self, dial: Callable[[], tuple[Any, Closing]], clock: Clock) -> None:
        self._clock = clock
        self._pool = ConnectionPool(dial, clock, 1, MIN_CONNECTIONS, MIN_CONNECTIONS)
        self._width = ConnectionCount()
        self._turns = asyncio.Semaphore(SLOTS * MIN_CONNECTIONS)
        self._capacity = SLOTS * MIN_CONNECTIONS
        self._arrived_at = 0.0
        self._carrying = 0
        self._waiting = 0
        self._taken_s = FIRST_TAKEN_S  # smoothed, like the next value
        self._off_s = 0.0
        self._given_up = False

    @property
    def count(self) -> int:
        """The target number of connections."""
        return self._width.lanes

    @property
    def together(self) -> int:
        """The number of frames per message: FRAMES_PER_MESSAGE on one quick connection, otherwise 1.

        On a quick connection, the cost per message matters. Messages of one frame let all connections share the frames.
        """
        quick = self._taken_s < QUICK_S and not self._width.far and self.count == MIN_CONNECTIONS
        return frame_messages.FRAMES_PER_MESSAGE if quick else 1

    @property
    def far(self) -> bool:
        """See `ConnectionCount.far`."""
        return self._width.far

    @property
    def spare(self) -> bool:
        """Whether one of several connections is idle, and no call waits for a connection."""
        if self._given_up or self.count == MIN_CONNECTIONS or self._turns.locked():
            return False
        connections = self._pool.connections
        return len(connections) < self.count or not all(each.busy for each in connections)

    @property
    def max_wait_s(self) -> float:
        """Seconds to wait for a frame's acknowledgement before sending the frame again: mean plus mean deviation.

        With a shorter wait, more frames would be sent twice, which delays other frames on a full link.
        """
        return self._taken_s + self._off_s

    async def take(self) -> Connection:
        """Waits for a connection, first come, first served. Return it with `give`. Raises LinkLost after `give_up`."""
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
        """Returns a connection. The next waiting `take` gets it."""
        self._pool.give(connection)
        if self._capacity > SLOTS * self.count:
            self._capacity -= 1
        else:
            self._turns.release()

    def answered(self, after_s: float, kernel_s: float | None = None) -> None:
        """Records a response time. See `ConnectionCount.answered`."""
        self._width.answered(after_s, self._clock.monotonic(), kernel_s)
        self._widen()

    @property
    def round_trip_s(self) -> float:
        """See `ConnectionCount.round_trip_s`."""
        return self._width.round_trip_s

    @contextlib.contextmanager
    def carrying(self) -> Iterator[TransferProgress]:
        """Context manager for an upload or a fetch. Yields the object that records the progress."""
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
        if self._waiting:  # otherwise the transfer is about to end, and some connections are idle
            self._width.arrived(size_bytes, now - self._arrived_at, now)
        self._arrived_at = now
        self._widen()

    def _widen(self) -> None:
        while self._capacity < SLOTS * self.count:
            self._capacity += 1
            self._turns.release()

    async def rest(self) -> None:
        """Closes surplus connections after IDLE_S seconds without transfers. Call this regularly."""
        some = len(self._pool.connections) > MIN_CONNECTIONS
        if some and not self._carrying and self._clock.monotonic() - self._arrived_at > IDLE_S:
            self._width.idle()
            await self._pool.rest(0.0)

    def give_up(self) -> None:
        """Makes every later `take` raise LinkLost, because another link replaces this one."""
        self._given_up = True

    async def close(self) -> None:
        """Closes all connections."""
        self.give_up()
        await self._pool.close()
