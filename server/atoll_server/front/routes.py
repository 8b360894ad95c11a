"""Which shard a call goes on to: the core's answer to Join says where each fragment is."""

from __future__ import annotations

import asyncio
from functools import partial

from atoll_wire import outer_pb2 as pb
from atoll_wire.access import Access, AccessError
from atoll_wire.clock import Clock
from atoll_wire.links import Link

from atoll_server.access.refusals import Refused, Status
from atoll_server.front.upstream import WATCH_S, Dial, Upstream


class Routes:
    """core: takes Join, Initialise and what operators ask, and whatever no other shard is known for."""

    def __init__(
        self,
        address: str,
        access: Access,
        clock: Clock,
        dial: Dial = partial(Link, alert=True),  # noqa: B008 - it is never changed
    ) -> None:
        self.clock = clock
        self._access, self._dial = access, dial
        self.core = Upstream(address, access, clock, dial)
        self._run = ("", 0)  # and generation, whose shards these are
        self._shards: list[Upstream] = []  # by number
        self._owners: dict[int, Upstream] = {}  # by fragment

    @property
    def up(self) -> bool:
        """Whether the core and every shard answered when they were last heard."""
        return all(shard.up for shard in self._all())

    async def joined(self, reply: pb.JoinReply) -> None:
        """Takes over where a ready run's shards are, and hides that: learners call all of them here.

        Raises Refused for an address that this front must not call.
        """
        if reply.state != pb.JoinReply.STATE_READY:
            return
        known = {shard.address: shard for shard in (self.core, *self._shards)}
        shards = [self._at(place.address, known) for place in reply.shards]
        self._run = (reply.run, reply.generation)
        self._shards = shards
        self._owners = {
            fragment: shard for shard, place in zip(shards, reply.shards, strict=True) for fragment in place.fragments
        }
        for place in reply.shards:
            place.address = ""
        for shard in known.values():
            if shard not in (self.core, *shards):
                await shard.close()

    def _at(self, address: str, known: dict[str, Upstream]) -> Upstream:
        if not address:
            return self.core
        if address not in known:
            try:
                self._access.check([address])
            except AccessError as error:
                text = f"this front cannot call the run's shard at {address}: {error}"
                raise Refused(Status.UNAVAILABLE, text) from error
            known[address] = Upstream(address, self._access, self.clock, self._dial)
        return known[address]

    def owner(self, session: pb.Session, fragment: int) -> Upstream:
        """The shard that has a fragment; the core, which then refuses, when none is known."""
        mine = (session.run, session.generation) == self._run
        return self._owners.get(fragment, self.core) if mine else self.core

    def numbered(self, session: pb.Session, number: int) -> Upstream:
        """The shard of this number; the core when none is known."""
        mine = (session.run, session.generation) == self._run and number < len(self._shards)
        return self._shards[number] if mine else self.core

    async def watch(self) -> None:
        """Goes on for ever: looks after the connections."""
        while True:
            await asyncio.sleep(WATCH_S)
            for shard in self._all():
                await shard.look()

    async def close(self) -> None:
        """Hangs up at once."""
        for shard in self._all():
            await shard.close()

    def _all(self) -> list[Upstream]:
        return list(dict.fromkeys((self.core, *self._shards)))
