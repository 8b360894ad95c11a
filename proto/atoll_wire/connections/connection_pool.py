"""The connections of one kind to one address: each carries some calls at a time before another one is dialled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from atoll_wire.connections.calls import LinkLost
from atoll_wire.process.clock import Clock

IDLE_S = 30.0  # without a call, before a connection is hung up
UNBOUNDED = 1 << 16  # connections: more than a core has learners


class Closing(Protocol):
    """The part of a gRPC channel that is needed here."""

    async def close(self) -> None:
        """Hangs up; the calls over it raise LinkLost."""


@dataclass(slots=True, eq=False)
class Connection:
    """busy: calls that use it now; used_at: monotonic seconds, when the last of them ended."""

    stub: Any
    channel: Any
    busy: int = 0
    used_at: float = 0.0


class ConnectionPool:
    """share: calls over each connection before another is dialled; most: connections at a time; fewest: that stay
    open once they were dialled.

    Beyond `share` times `most` calls the connections carry more. dial: returns a stub and its channel.
    """

    def __init__(
        self,
        dial: Callable[[], tuple[Any, Closing]],
        clock: Clock,
        share: int,
        most: int = UNBOUNDED,
        fewest: int = 0,
    ) -> None:
        self._dial, self._share, self.most, self._fewest = dial, share, most, fewest
        self._clock = clock
        self._closed = False
        self.connections: list[Connection] = []

    def take(self) -> Connection:
        """The least busy connection; `give` it back. Raises LinkLost once the pool is closed."""
        if self._closed:
            raise LinkLost("the connections were given up")
        found = min(self.connections, key=lambda each: each.busy, default=None)
        if found is None or (found.busy >= self._share and len(self.connections) < self.most):
            found = Connection(*self._dial())
            self.connections.append(found)
        found.busy += 1
        return found

    def give(self, connection: Connection) -> None:
        """The call is over."""
        connection.busy -= 1
        connection.used_at = self._clock.monotonic()

    @contextlib.contextmanager
    def use(self) -> Iterator[Connection]:
        """A connection for one call. Raises LinkLost once the pool is closed."""
        connection = self.take()
        try:
            yield connection
        finally:
            self.give(connection)

    async def rest(self, idle_s: float = IDLE_S) -> None:
        """Called now and then: hangs up connections beyond the fewest without a call for `idle_s`."""
        now = self._clock.monotonic()
        for each in self.connections[self._fewest :]:
            if not each.busy and now - each.used_at >= idle_s:
                self.connections.remove(each)
                await each.channel.close()

    async def close(self) -> None:
        """Hangs up; the calls that still wait raise LinkLost."""
        self._closed = True
        for each in self.connections:
            await each.channel.close()
