"""Selects the shard that receives a call. The core's replies to Join and Describe list the shards."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial

from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.link import Link
from atoll_wire.process.clock import Clock
from atoll_wire.security.transport import TransportSecurity, TransportSecurityError

from atoll_server.access.refusals import Refused, Status
from atoll_server.upstream.core_connection import WATCH_S, CoreConnection, Dial, UpstreamShard


class Routes:
    """The run's shards that a front knows, and the connections to them.

    core: the connections for Join, Initialise, Describe and operators' calls. default: the shard for all fragments
    until a reply of the core lists the shards. nonce: number that identifies this front's process to the core.
    """

    def __init__(
        self,
        address: str,
        security: TransportSecurity,
        clock: Clock,
        dial: Dial = partial(Link, keepalive=True),  # noqa: B008 - the default is never changed
    ) -> None:
        self.clock = clock
        self.nonce = 1 + secrets.randbits(63)
        self._security = security
        self._dial = dial
        self.core = CoreConnection(address, security, clock, dial)
        self._run = ("", 0)  # run and generation of these shards
        self.default = UpstreamShard(self.core, None)
        self._shards: list[UpstreamShard] = []  # by number
        self._owners: dict[int, UpstreamShard] = {}  # by fragment

    @property
    def registrar(self) -> UpstreamShard:
        """A shard at the address of the registrar, for calls about the whole run."""
        return next((shard for shard in self._shards if shard.core_connection is self.core), self.default)

    @property
    def up(self) -> bool:
        """Whether every known shard answered its last call."""
        return all(shard.up for shard in self._shards or [self.default])

    async def placed(self, reply: pb.JoinReply | pb.DescribeReply) -> None:
        """Stores the shards that the core's reply lists.

        reply: reply of the core, which is changed in place. The method removes the shards' addresses from it, since
        callers reach shards through this front. Raises Refused for an address that this front must not call.
        """
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
                text = f"this front cannot call a shard of the run: {error}"
                raise Refused(Status.UNAVAILABLE, text) from error
            known[address] = CoreConnection(address, self._security, self.clock, self._dial)
        return known[address]

    def owner(self, session: pb.Session | pb.ReadRequest, fragment: int) -> UpstreamShard:
        """Returns the shard with this fragment.

        Returns the default shard for an unknown fragment and for another run or generation.
        """
        mine = (session.run, session.generation) == self._run
        return self._owners.get(fragment, self.default) if mine else self.default

    @property
    def addresses(self) -> list[CoreConnection]:
        """The connections to all addresses of the run, the registrar's first."""
        return self._upstreams()

    def numbered(self, session: pb.Session | pb.DescribeReply, number: int) -> UpstreamShard:
        """Returns the shard with this number.

        Returns the default shard for an unknown number and for another run or generation.
        """
        mine = (session.run, session.generation) == self._run and number < len(self._shards)
        return self._shards[number] if mine else self.default

    def near(self, session: pb.Session) -> UpstreamShard:
        """Returns the first shard at the address to which this front sends Joins, or the default shard."""
        return self.registrar if (session.run, session.generation) == self._run else self.default

    async def watch(self) -> None:
        """Maintains all connections until this task is cancelled."""
        await self.core.tls_fault()  # so that the log names a fault before a learner needs the core
        while True:
            await asyncio.sleep(WATCH_S)
            for core_connection in self._upstreams():
                await core_connection.look()

    async def close(self) -> None:
        """Closes all connections immediately."""
        for core_connection in self._upstreams():
            await core_connection.close()

    def _upstreams(self) -> list[CoreConnection]:
        return list(dict.fromkeys((self.core, *(shard.core_connection for shard in self._shards))))
