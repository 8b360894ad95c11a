"""Maintains a front's connections to the core's addresses and records what the front knows about each shard."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

import structlog
from atoll_wire.connections.link import Link, close_gracefully
from atoll_wire.process.clock import Clock
from atoll_wire.security.transport import TransportSecurity

from atoll_server.upstream.known_sessions import KnownSessions

log = structlog.get_logger()

WATCH_S = 0.5
AGAIN_S = 5.0  # seconds after a dial and after its first answer in which a failure causes no further dial

Dial: TypeAlias = Callable[[str, TransportSecurity, Clock], Link]
FragmentKey: TypeAlias = tuple[str, int, int]  # run, generation, fragment


class CoreConnection:
    """A front's connections to one address, which all the front's learners share. link: the current connections."""

    def __init__(self, address: str, security: TransportSecurity, clock: Clock, dial: Dial) -> None:
        self.address = address
        self.clock = clock
        self._security = security
        self._dial = dial
        self._closing: set[asyncio.Task[None]] = set()
        self._fault, self._fault_at = "", -math.inf
        self._silent = False  # a failure since the last answer
        self._open()

    def _open(self) -> None:
        self.link = self._dial(self.address, self._security, self.clock)
        self._kept_since, self._has_answered = self.clock.monotonic(), False

    async def look(self) -> None:
        """Dials again if the certificates have changed.

        Closes idle connections. Must be called every WATCH_S seconds.
        """
        if self.link.stale:
            log.warning("the certificates have changed: reconnecting", core=self.address)
            self._dial_again()
        await self.link.rest()

    def answered(self, link: Link) -> None:
        """Records that the core answered a call over this link. Logs the first answer after a dial or a failure."""
        if link is not self.link or (self._has_answered and not self._silent):
            return
        log.info("connected to the core", core=self.address)
        if not self._has_answered:
            self._kept_since, self._has_answered = self.clock.monotonic(), True
        self._silent = False
        self._fault, self._fault_at = "", -math.inf

    def suspect(self, link: Link) -> None:
        """Dials again after a call over this link lost its connection, since the link's other connections may be dead.

        Does not dial within AGAIN_S seconds after the last dial or its first answer. Connection attempts that began
        before the core's start may still fail in this time, but gRPC repeats them. A delayed dial could close
        connections that have recovered since the failure, so this method decides immediately. Logs the first failure
        after an answer.
        """
        if link is not self.link:
            return
        if not self._silent:
            log.warning("the core does not answer: trying again until it does", core=self.address)
        self._silent = True
        if self.clock.monotonic() - self._kept_since > AGAIN_S:
            self._dial_again()

    async def tls_fault(self) -> str:
        """Returns the reason why TLS prevents connections to the core, with the fix; empty if TLS is not the cause.

        Logs each new fault once. Calls within AGAIN_S seconds share the result.
        """
        now = self.clock.monotonic()
        if now - self._fault_at > AGAIN_S:
            self._fault_at = now
            before, self._fault = self._fault, await self.link.tls_fault()
            if self._fault not in {"", before}:
                log.error("TLS prevents connections to the core", error=self._fault)
        return self._fault

    def _dial_again(self) -> None:
        """Dials new connections for all later calls. Only running transfers continue on the old connections."""
        self._retire()
        self._open()

    def _retire(self) -> None:
        self._closing.add(task := asyncio.get_running_loop().create_task(close_gracefully(self.link)))
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all connections immediately."""
        for task in self._closing:
            task.cancel()
        await self.link.close()


class UpstreamShard:
    """A front's knowledge of one shard. Several shards may have the same address.

    fragments: the shard's fragments; None for all fragments. up: whether the shard answered its last call.
    sessions: sessions that the shard accepted recently. counts: number of frames of each fragment. newest: newest known
    version of each fragment. whole: for each fragment, version and checksum of the newest whole fragment that the shard
    sent.
    """

    def __init__(self, core_connection: CoreConnection, fragments: frozenset[int] | None) -> None:
        self.core_connection = core_connection
        self.fragments = fragments
        self.up = False
        self.sessions = KnownSessions()
        self.counts: dict[FragmentKey, int] = {}
        self.newest: dict[FragmentKey, int] = {}
        self.whole: dict[FragmentKey, tuple[int, int]] = {}
        self._log = 0

    @property
    def link(self) -> Link:
        """The current connections to the shard's address."""
        return self.core_connection.link

    def told(self, log: int, run: str, generation: int, versions: Iterable[tuple[int, int]]) -> bool:
        """Records a shard's message. log: as in Notification (outer.proto). versions: pairs of fragment and version.

        Returns False if the log has changed. The caller must then drop all cached items, since they may have versions
        that do not exist in the new log.
        """
        same = log == self._log
        if not same:
            self._log = log
            self.sessions.clear()
            self.newest.clear()
            self.whole.clear()
        for number, version in versions:
            fragment = (run, generation, number)
            self.newest[fragment] = max(version, self.newest.get(fragment, 0))
        return same
