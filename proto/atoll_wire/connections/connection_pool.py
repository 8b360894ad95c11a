"""A pool of connections of one kind to one address, which dials another one when all carry their share of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from atoll_wire.connections.calls import LinkLost
from atoll_wire.process.clock import Clock

IDLE_S = 30.0  # seconds without a call after which a connection is closed
UNBOUNDED = 1 << 16  # more connections than a core has learners


class Closing(Protocol):
    """The method of a gRPC channel that is used here."""

    async def close(self) -> None:
        """Closes the channel; the calls over it raise LinkLost."""


@dataclass(slots=True, eq=False)
class Connection:
    """A connection. busy: calls that use it now; used_at: monotonic seconds when the last call ended."""

    stub: Any
    channel: Any
    busy: int = 0
    used_at: float = 0.0


class ConnectionPool:
    """A pool of connections. share: calls over each connection before another is dialled. most: connections at a time.

    fewest: connections that stay open once they were dialled. Beyond `share` times `most` calls, connections carry more
    than their share. dial: returns a stub and its channel.
    """

    def __init__(
        self,
        dial: Callable[[], tuple[Any, Closing]],
        clock: Clock,
        share: int,
        most: int = UNBOUNDED,
        fewest: int = 0,
    ) -> None:
        self._dial = dial
        self._share = share
        self.most = most
        self._fewest = fewest
        self._clock = clock
        self._closed = False
        self.connections: list[Connection] = []

    def take(self) -> Connection:
        """The least busy connection, for one call; `give` it back. Raises LinkLost once the pool is closed."""
        if self._closed:
            raise LinkLost("the connections were closed")
        found = min(self.connections, key=lambda each: each.busy, default=None)
        if found is None or (found.busy >= self._share and len(self.connections) < self.most):
            found = Connection(*self._dial())
            self.connections.append(found)
        found.busy += 1
        return found

    def give(self, connection: Connection) -> None:
        """Gives a connection back after its call."""
        connection.busy -= 1
        connection.used_at = self._clock.monotonic()

    @contextlib.contextmanager
    def use(self) -> Iterator[Connection]:
        """Context with a connection for one call. Raises LinkLost once the pool is closed."""
        connection = self.take()
        try:
            yield connection
        finally:
            self.give(connection)

    async def rest(self, idle_s: float = IDLE_S) -> None:
        """Closes connections, beyond the fewest, that had no call for `idle_s` seconds; call it regularly."""
        now = self._clock.monotonic()
        for each in self.connections[self._fewest :]:
            if not each.busy and now - each.used_at >= idle_s:
                self.connections.remove(each)
                await each.channel.close()

    async def close(self) -> None:
        """Closes all connections; waiting calls raise LinkLost."""
        self._closed = True
        for each in self.connections:
            await each.channel.close()
