"""A pool of connections of one kind to one address.

The pool opens another connection once each open connection carries its share of calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from atoll_wire.connections.calls import LinkLost
from atoll_wire.process.clock import Clock

IDLE_S = 30.0  # seconds without a call after which a connection is closed
UNBOUNDED = 1 << 16  # larger than the number of learners of any core


class Closing(Protocol):
    """The method of gRPC channels that this module uses."""

    async def close(self) -> None:
        """Closes the channel. Its calls raise LinkLost."""


@dataclass(slots=True, eq=False)
class Connection:
    """A channel and its stub. busy: number of current calls. used_at: end of the last call, in monotonic seconds."""

    stub: Any
    channel: Any
    busy: int = 0
    used_at: float = 0.0


class ConnectionPool:
    """A pool of connections. dial: function that opens a connection and returns its stub and channel.

    share: number of calls per connection before the pool opens another one. most: limit on open connections. fewest:
    number of connections that stay open when idle. With more than `share` times `most` calls, connections carry more
    than their share.
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
        """Lends the least busy connection, or a new one, for a call. Return it with `give`.

        Raises LinkLost if the pool is closed.
        """
        if self._closed:
            raise LinkLost("the connections were closed")
        found = min(self.connections, key=lambda each: each.busy, default=None)
        if found is None or (found.busy >= self._share and len(self.connections) < self.most):
            found = Connection(*self._dial())
            self.connections.append(found)
        found.busy += 1
        return found

    def give(self, connection: Connection) -> None:
        """Returns a connection to the pool after its call."""
        connection.busy -= 1
        connection.used_at = self._clock.monotonic()

    @contextlib.contextmanager
    def use(self) -> Iterator[Connection]:
        """Context manager that lends a connection for one call. Raises LinkLost if the pool is closed."""
        connection = self.take()
        try:
            yield connection
        finally:
            self.give(connection)

    async def rest(self, idle_s: float = IDLE_S) -> None:
        """Closes connections without a call for `idle_s` seconds, except the first `fewest`. Call this regularly."""
        now = self._clock.monotonic()
        for each in self.connections[self._fewest :]:
            if not each.busy and now - each.used_at >= idle_s:
                self.connections.remove(each)
                await each.channel.close()

    async def close(self) -> None:
        """Closes all connections. Waiting calls raise LinkLost."""
        self._closed = True
        for each in self.connections:
            await each.channel.close()
