"""A hostile process that makes calls that no agent would make, and the limits of its effect.

Each kind of harm draws from its own random stream. The process starts at the beginning or during the storm. It stays
until the other learners have trained, and their work has been merged, in its presence.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import grpc.aio
import numpy as np
import safetensors.numpy
from atoll_server.access.reader_limits import MAX_OLD
from atoll_server.shard.shard import Shard
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import tolerate_ended_call
from atoll_wire.contract import PROTOCOL, tensor_message
from atoll_wire.messages.message_parts import MORE, PART

from tests.simulation.bookkeeping import Violation, shard_of, the_shard
from tests.simulation.hostile import NAME
from tests.simulation.joins import QUICK
from tests.simulation.loop import Process
from tests.simulation.network import CORE, Call, Half, SimulatedLink
from tests.simulation.training import TENSORS

if TYPE_CHECKING:
    from tests.simulation.world import World

AT_ONCE = 40  # calls per turn
TURN_S = 0.2
MERGES = 2  # merges that it sees before it leaves
LEASE_S = 3.0  # in worlds with `FROM_THE_START` harms


class Harm(StrEnum):
    """The calls of a hostile process."""

    HALVES = "incomplete messages"
    STALLED = "fetches of whole fragments that it does not read"
    QUIET = "many streams without frames for one upload"
    REGIONS = "a Join from a new region in each turn"
    NAMELESS = "a Join with nonce 0 under another learner's name"
    LEASE = "the lease for the initial parameters, never used"
    FENCED = "all calls of a process after another one took its name"
    EVICTED = "all calls of an evicted process"


GATED = {Harm.HALVES, Harm.STALLED, Harm.QUIET}
FROM_THE_START = {Harm.LEASE, Harm.FENCED, Harm.EVICTED}


class Caller:
    """One hostile process, which calls the core directly."""

    def __init__(self, harm: Harm, world: World, rng: random.Random) -> None:
        self.harm, self._world, self._rng = harm, world, rng
        self.process = Process(f"{NAME}#{harm.name.lower()}")
        self._stub = SimulatedLink(world.network, self.process, CORE).quick.take().stub
        self.calls: list[Call] = []
        self._session: pb.Session | None = None
        self._turns = self._seq = 0
        self._file = safetensors.numpy.save({t.name: np.zeros(t.shape, np.float32) for t in TENSORS})
        self._digest = hashlib.sha256(self._file).digest()
        self._works: dict[Harm, Callable[[], Awaitable[None]]] = {
            Harm.HALVES: self._halves, Harm.STALLED: self._stalled, Harm.QUIET: self._quiet,
            Harm.REGIONS: self._regions, Harm.NAMELESS: self._nameless, Harm.LEASE: self._lease,
            Harm.FENCED: self._too_late, Harm.EVICTED: self._too_late,
        }  # fmt: skip
        self.process.start(self._live(), name=self.process.name)

    async def _live(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._works[self.harm]()
            self.calls = [call for call in self.calls if not call.done()]
            self._turns += 1
            await asyncio.sleep(TURN_S)

    # ------------------------------------------------------------------------------ actions

    async def _join(self, name: str = NAME, region: str = "somewhere", nonce: int | None = None) -> pb.JoinReply:
        nonce = self._rng.getrandbits(62) | 1 if nonce is None else nonce
        request = pb.JoinRequest(
            protocol=PROTOCOL, learner=name, region=region, nonce=nonce, frozen_digest=b"frozen",
            tensors=[tensor_message(tensor) for tensor in TENSORS],
        )  # fmt: skip
        reply: pb.JoinReply = await self._stub.Join(request, timeout=2.0)
        if reply.state == pb.JoinReply.STATE_CONFIRM:
            request.proof = reply.token
            reply = await self._stub.Join(request, timeout=2.0)
        self._count("let in")
        return reply

    async def _speak(self) -> pb.Session:
        """Returns the caller's session. Joins first if the core does not know one."""
        core = self._world.core
        entry = core.run.registry.entries.get(NAME) if core is not None else None
        if self._session is None or entry is None or core.run.token(entry) != self._session.token:
            self._session = self._as(await self._join())
        return self._session

    def _as(self, reply: pb.JoinReply) -> pb.Session:
        return pb.Session(
            run=reply.run, learner=NAME, incarnation=reply.incarnation, generation=reply.generation, token=reply.token
        )

    def _begun(self, call: Call, *messages: object) -> None:
        for message in messages:
            call.send(message)
        self.calls.append(call)
        self._count("calls")

    def _count(self, what: str) -> None:
        self._world.counts[f"hostile {self.harm.name.lower()}: {what}"] += 1

    async def _halves(self) -> None:
        for _ in range(AT_ONCE):
            self._begun(self._stub.Push(), Half(b"".join((MORE, bytes((PART, 8)), b"a piece "))))

    async def _stalled(self) -> None:
        session = await self._speak()
        for fragment in range(len(self._world.checks.newest)):
            call = self._stub.Fetch(pb.FetchRequest(session=session, fragment=fragment, whole=True))
            call.read_by_its_caller = False
            self._begun(call)

    async def _quiet(self) -> None:
        session = await self._speak()
        core = self._world.core
        shard = shard_of(core)
        if shard is None:
            return
        fragment = shard.layout.fragments[0]
        header = pb.PushHeader(
            session=session, fragment=0, seq=1, base_version=shard.fragments[0].version, tokens=8, steps=1,
            codec=int(shard.context.run.codec), frames=len(fragment.frames), size_bytes=64 * len(fragment.frames),
            digest=bytes(32),
        )  # fmt: skip
        for _ in range(AT_ONCE):
            self._begun(self._stub.Push(), pb.PushRequest(header=header))

    async def _regions(self) -> None:
        await self._join(region=f"region {self._turns}")

    async def _nameless(self) -> None:
        await self._join(self._rng.choice(self._world.names), nonce=0)

    async def _lease(self) -> None:
        """Joins repeatedly, and sends the same few bytes, or none."""
        session = self._as(await self._join(nonce=7))
        header = pb.InitialiseHeader(session=session, size_bytes=len(self._file), sha256=bytes(32))
        call = self._stub.Initialise()
        self._begun(call, pb.InitialiseRequest(header=header))
        for _ in range(4):
            await asyncio.sleep(TURN_S)
            chunk = self._file[:64] if self._rng.random() < 0.5 else b""
            with tolerate_ended_call():
                await call.write(pb.InitialiseRequest(chunk=chunk))

    async def _too_late(self) -> None:
        """Joins, loses its right to make calls, and then makes every call."""
        if self._session is None:
            session = self._as(await self._join())
            if not await self._is_silenced():  # the request may have failed, so the process still has its rights
                return
            self._session = session
            self._count("silenced")
        await self._say_everything(self._session)

    async def _is_silenced(self) -> bool:
        if self.harm is Harm.FENCED:
            return (await self._join()).incarnation > 1
        core, process = self._world.core, self._world.core_process
        if core is None or process is None or not process.alive or NAME not in core.run.registry.entries:
            return False
        told = process.start(core.run.evict(NAME, "test"))
        await asyncio.wait({told})
        return not told.cancelled() and told.exception() is None

    async def _say_everything(self, session: pb.Session) -> None:
        self._begun(self._stub.Report(), pb.Progress(session=session, steps=100, tokens=1000))
        self._begun(self._stub.Follow(pb.FollowRequest(session=session)))
        self._begun(self._stub.Fetch(pb.FetchRequest(session=session, fragment=0, whole=True)))
        header = pb.InitialiseHeader(session=session, size_bytes=len(self._file), sha256=self._digest)
        call = self._stub.Initialise()
        self._begun(call, pb.InitialiseRequest(header=header), pb.InitialiseRequest(chunk=self._file))
        call.end_of_requests()
        await call

    # ------------------------------------------------------------------------------ limits

    def check(self) -> None:
        """Checks limits that hold at any moment. Raises Violation."""
        core = self._world.core
        served = Counter(
            call.method for call in self._world.network.calls if call.learner is self.process and call.served
        )
        for method, count in served.items():
            waiting = QUICK.first_waiting if self.harm is Harm.HALVES else 0
            most = QUICK.streams(method) * 5 // 4 + QUICK.first_calls + waiting  # ending calls still count
            if self.harm in GATED and count > most:
                raise Violation(11, f"a hostile learner has {count} open calls of {method}, the limit is {most}")
        if core is None:
            return
        if len(regions := core.run.registry.regions()) > 2:
            raise Violation(11, f"a hostile learner occupies regions {regions}")
        if core.run.shard is not None and len(old := _old_versions(the_shard(core))) > MAX_OLD:
            raise Violation(11, f"{len(old)} old versions are kept for readers, the limit is {MAX_OLD}")
        if self.harm in {Harm.FENCED, Harm.EVICTED} and NAME in core.run.registry.entries:
            if tokens := core.run.registry.entries[NAME].account.total("tokens"):
                raise Violation(6, f"{tokens} tokens of a fenced or evicted process count")
            if core.run.initial_sha256 == self._digest.hex():
                raise Violation(5, "the initial parameters came from a fenced or evicted process")


def _old_versions(shard: Shard) -> set[tuple[object, object]]:
    versions = shard.readers._versions
    read = {(reader.thing, reader.version) for reader in versions._readers.values()}
    return {place for place in read if versions._newest.get(place[0]) != place[1]}
