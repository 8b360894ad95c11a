"""The connections that carry frames, as many as make a difference.

One TCP connection does not fill a long link that loses packets: its window falls with each loss and grows back by a
packet a round trip, and after a pause it begins small. So where an answer takes long there are more and more of them,
unless more turn out to bring less; close by, one is as fast as this machine.
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
FAR_CONNECTIONS = 8  # far away at first; what more bring is tried
MAX_CONNECTIONS = 32
SLOTS = 2  # calls that use one connection at a time: one carries frames while the other waits for its answer
FAR_S, ANSWERS = 0.01, 8  # a round trip from which on a window matters; answers of which one waited for nothing
WINDOW_S, WINDOW_ARRIVALS = 2.0, 6  # of carrying, and of what arrived: at least, for a rate
HURT = 0.95  # of the rate with half the connections: below it they were too many
REST_S = 30.0  # before more are tried again
ENOUGH = 150e6  # bytes/s: here the processor is what limits
QUICK_S = 0.25  # a frame was taken in
FIRST_TAKEN_S, SHARE = 1.0, 1 / 8  # of a frame until it was taken in; of the newest in what is usual


class ConnectionCount:
    """PURE: how many connections there should be, by the round trip and the rates that were seen."""

    def __init__(self) -> None:
        self._answers_s: deque[float] = deque(maxlen=ANSWERS)  # the newest: a route may change
        self.idle()

    def idle(self) -> None:
        """Nothing was carried for a while: the fewest, and what was seen of rates is forgotten."""
        self.lanes = MIN_CONNECTIONS
        self._bytes = 0
        self._busy_s = 0.0
        self._arrivals = 0
        self._before: float | None = None  # the rate with half as many
        self._changed = self._leapt = False  # changed: what is on its way went over the connections of before
        self._rested_at = 0.0

    def answered(self, after_s: float) -> None:
        """An answer came, that waited behind nothing but the work of both sides: the shortest tells the round trip."""
        self._answers_s.append(after_s)
        if after_s < FAR_S and self.lanes > MIN_CONNECTIONS:
            self.idle()  # it only seemed far, while both sides were busy
        elif self.far and not self._leapt:
            self.lanes = FAR_CONNECTIONS
            self._changed = True
            self._leapt = True

    @property
    def far(self) -> bool:
        """Whether a window matters here, as far as is known."""
        return len(self._answers_s) == ANSWERS and min(self._answers_s) >= FAR_S

    def arrived(self, size_bytes: int, busy_s: float, now: float) -> None:
        """So much arrived in so many seconds of carrying, over all lanes together."""
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
    """How one contribution or update goes: of what is waiting beside what is under way a rate can be told."""

    def __init__(self, lanes: ParallelConnections) -> None:
        self._lanes = lanes
        self._waiting = 0

    def waiting(self, frames: int) -> None:
        """So many have not been given to a connection yet."""
        self._lanes._waits(frames - self._waiting)
        self._waiting = frames

    def arrived(self, size_bytes: int, taken_s: Iterable[float] = ()) -> None:
        """At the other end: a connection takes megabytes before the first is through. taken_s: by each frame."""
        self._lanes._arrived(size_bytes, taken_s)


class ParallelConnections:
    """To one address. dial: a stub and its channel, as a connection of their own."""

    def __init__(self, dial: Callable[[], tuple[Any, Closing]], clock: Clock) -> None:
        self._clock = clock
        self._pool = ConnectionPool(dial, clock, 1, MIN_CONNECTIONS, MIN_CONNECTIONS)
        self._width = ConnectionCount()
        self._turns = asyncio.Semaphore(SLOTS * MIN_CONNECTIONS)
        self._capacity = SLOTS * MIN_CONNECTIONS
        self._arrived_at = 0.0
        self._carrying = 0
        self._waiting = 0
        self._taken_s = FIRST_TAKEN_S  # smoothed, as the next
        self._off_s = 0.0
        self._given_up = False

    @property
    def count(self) -> int:
        """How many there should be."""
        return self._width.lanes

    @property
    def together(self) -> int:
        """Frames that are best put into one message: on a quick link it costs more, on others lanes want to share."""
        quick = self._taken_s < QUICK_S and not self._width.far and self.count == MIN_CONNECTIONS
        return frame_messages.FRAMES_PER_MESSAGE if quick else 1

    @property
    def spare(self) -> bool:
        """A connection beside others has nothing to do, and nobody waits for one."""
        if self._given_up or self.count == MIN_CONNECTIONS or self._turns.locked():
            return False
        connections = self._pool.connections
        return len(connections) < self.count or not all(each.busy for each in connections)

    @property
    def max_wait_s(self) -> float:
        """With a frame before it is sent once more: what is usual, and as much as frames usually are off that.

        On a link that is full whatever is sent twice takes the place of what was not yet sent.
        """
        return self._taken_s + self._off_s

    async def take(self) -> Connection:
        """Waits for a turn, in the order of asking; `give` it back. Raises LinkLost once the lanes were given up."""
        await self._turns.acquire()
        try:
            if self._given_up:
                raise LinkLost("the connections were given up")
            self._pool.most = self.count
            return self._pool.take()
        except BaseException:
            self._turns.release()
            raise

    def give(self, connection: Connection) -> None:
        """The turn is over."""
        self._pool.give(connection)
        if self._capacity > SLOTS * self.count:
            self._capacity -= 1
        else:
            self._turns.release()

    def answered(self, after_s: float) -> None:
        """How long the other end took to answer a question that waited behind no frame."""
        self._width.answered(after_s)
        self._widen()

    @contextlib.contextmanager
    def carrying(self) -> Iterator[TransferProgress]:
        """While a contribution or an update is on its way. What is given is told how that goes."""
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
        if self._waiting:  # else it is the end of something: lanes have nothing to do
            self._width.arrived(size_bytes, now - self._arrived_at, now)
        self._arrived_at = now
        self._widen()

    def _widen(self) -> None:
        while self._capacity < SLOTS * self.count:
            self._capacity += 1
            self._turns.release()

    async def rest(self) -> None:
        """Called now and then: hangs up what was not needed for a while."""
        some = len(self._pool.connections) > MIN_CONNECTIONS
        if some and not self._carrying and self._clock.monotonic() - self._arrived_at > IDLE_S:
            self._width.idle()
            await self._pool.rest(0.0)

    def give_up(self) -> None:
        """Nobody else gets a turn: the address is called elsewhere from now on."""
        self._given_up = True

    async def close(self) -> None:
        """Hangs all up."""
        self.give_up()
        await self._pool.close()
