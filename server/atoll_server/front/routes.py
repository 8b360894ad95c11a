"""Which shard a call goes on to: the core's answer to Join says where each fragment is."""

from __future__ import annotations

import asyncio
from functools import partial

from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.link import Link
from atoll_wire.process.clock import Clock
from atoll_wire.security.transport import TransportSecurity, TransportSecurityError

from atoll_server.access.refusals import Refused, Status
from atoll_server.front.core_connection import WATCH_S, CoreConnection, Dial, UpstreamShard


class Routes:
    """core: takes Join, Initialise and what operators ask. default: stands for its shards before a Join names them."""

    def __init__(
        self,
        address: str,
        security: TransportSecurity,
        clock: Clock,
        dial: Dial = partial(Link, keepalive=True),  # noqa: B008 - it is never changed
    ) -> None:
        self.clock = clock
        self._security, self._dial = security, dial
        self.core = CoreConnection(address, security, clock, dial)
        self._run = ("", 0)  # and generation, whose shards these are
        self.default = UpstreamShard(self.core, None)
        self._shards: list[UpstreamShard] = []  # by number
        self._owners: dict[int, UpstreamShard] = {}  # by fragment

    @property
    def up(self) -> bool:
        """Whether every shard answered when it was last heard."""
        return all(shard.up for shard in self._shards or [self.default])

    async def joined(self, reply: pb.JoinReply) -> None:
        """Takes over where a ready run's shards are, and hides that: learners call all of them here.

        Raises Refused for an address that this front must not call.
        """
        if reply.state != pb.JoinReply.STATE_READY:
            return
        known = {(shard.core_connection, shard.fragments): shard for shard in self._shards}
        upstreams = {core_connection.address: core_connection for core_connection in self._upstreams()}
        shards = list[UpstreamShard]()
        for place in reply.shards:
            core_connection = self._at(place.address, upstreams)
            fragments = frozenset(place.fragments)
            shards.append(known.get((core_connection, fragments)) or UpstreamShard(core_connection, fragments))
            place.address = ""
        self._run = (reply.run, reply.generation)
        self._shards = shards
        self._owners = {fragment: shard for shard in shards for fragment in shard.fragments or ()}
        for core_connection in upstreams.values():
            if core_connection not in self._upstreams():
                await core_connection.close()

    def _at(self, address: str, known: dict[str, CoreConnection]) -> CoreConnection:
        if not address:
            return self.core
        if address not in known:
            try:
                self._security.check([address])
            except TransportSecurityError as error:
                text = f"this front cannot call the run's shard at {address}: {error}"
                raise Refused(Status.UNAVAILABLE, text) from error
            known[address] = CoreConnection(address, self._security, self.clock, self._dial)
        return known[address]

    def owner(self, session: pb.Session, fragment: int) -> UpstreamShard:
        """The shard that has a fragment, or the default."""
        mine = (session.run, session.generation) == self._run
        return self._owners.get(fragment, self.default) if mine else self.default

    def numbered(self, session: pb.Session, number: int) -> UpstreamShard:
        """The shard of this number, or the default."""
        mine = (session.run, session.generation) == self._run and number < len(self._shards)
        return self._shards[number] if mine else self.default

    def near(self, session: pb.Session) -> UpstreamShard:
        """The first shard where the run is joined, or the default."""
        mine = (session.run, session.generation) == self._run
        shards = self._shards if mine else []
        return next((shard for shard in shards if shard.core_connection is self.core), self.default)

    async def watch(self) -> None:
        """Goes on for ever: looks after the connections."""
        while True:
            await asyncio.sleep(WATCH_S)
            for core_connection in self._upstreams():
                await core_connection.look()

    async def close(self) -> None:
        """Hangs up at once."""
        for core_connection in self._upstreams():
            await core_connection.close()

    def _upstreams(self) -> list[CoreConnection]:
        return list(dict.fromkeys((self.core, *(shard.core_connection for shard in self._shards))))
