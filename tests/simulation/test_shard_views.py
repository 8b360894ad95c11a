"""One learner with two shards: an unreachable shard stalls only its own fragments.

The learner is the real agent on the virtual clock. The shards are simulated: each repeatedly opens rounds, accepts
contributions, and publishes updates that ignore them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
from atoll.errors import LearnerError
from atoll_server.access.audit_log import AuditLog
from atoll_server.front.answering import Answering
from atoll_server.front.metrics import FrontMetrics
from atoll_server.front.service import FrontService
from atoll_server.upstream.routes import Routes
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.connections.link import ATOLL_STATUS
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, plan
from atoll_wire.messages import frame_messages
from atoll_wire.security.transport import LOCAL

from tests.simulation.checks import Name
from tests.simulation.island import Island
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network, SimulatedLink, Weather
from tests.simulation.seed import determinism
from tests.simulation.training import TENSORS

FRAGMENTS = 4
ROUND_S, STEP_S = 1.0, 0.2
NEAR, FAR = (0, 2), (1, 3)


class Seen:
    """Records the learner's adoptions by fragment, in place of the simulation's checks."""

    def __init__(self) -> None:
        self.trained: dict[tuple[str, int], int] = {}
        self.versions: dict[int, int] = {}
        self.anchors: dict[int, np.ndarray] = {}

    def adopted(self, _: Island, fragment: int, version: int, anchor: np.ndarray) -> None:
        self.versions[fragment] = version
        self.anchors[fragment] = anchor

    def note(self, _: str) -> None:
        """Does nothing."""

    def taken(self, _: Island, name: Name) -> None:
        """Does nothing."""

    def sent(self, name: Name, digest: bytes) -> None:
        """Does nothing."""


class Fragment:
    """A fragment's published versions, and the updates between them."""

    def __init__(self, length: int) -> None:
        self.versions = [np.zeros(length, np.float32)]
        self.updates: list[tuple[list[bytes], list[pb.Receipt]]] = [([], [])]
        self.cycle = 0
        self.came: dict[int, set[int]] = defaultdict(set)  # number of frames of each contribution
        self.newest = pb.Receipt()


class PlayedShard:
    """A simulated shard, which may be killed. Its versions and acknowledgements survive; its notifications do not."""

    def __init__(self, network: Network, address: str, layout: Layout, owned: Sequence[int]) -> None:
        self._network, self._layout, self.address = network, layout, address
        self.fragments = {index: Fragment(layout.fragments[index % FRAGMENTS].length) for index in owned}
        self.places: list[pb.ShardPlace] = []
        self.joins = self.logs = 0
        self.follows: list[int] = []
        self.adopted: set[int] = set()
        self.heard_fragments: set[int] = set()
        self.begin()

    def begin(self) -> None:
        self.process = Process(self.address)
        self.logs += 1
        self.log = hash((self.address, self.logs)) & 0xFFFF
        self.notifications: list[pb.Notification] = []
        self._network.servers[self.address] = (self, self.process)
        self.process.start(self._open_rounds())

    def kill(self) -> None:
        self._network.died(self.address)
        self.process.kill()

    def forget(self, count: int) -> None:
        """Restores the shard from a backup: it loses the newest versions, and repeats them with other values."""
        for fragment in self.fragments.values():
            del fragment.versions[-count:]
            del fragment.updates[-count:]
            fragment.newest = pb.Receipt()
            fragment.came.clear()

    async def _open_rounds(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            for index, fragment in self.fragments.items():
                fragment.cycle += 1
                self._say(opened=pb.RoundOpened(fragment=index, cycle=fragment.cycle))

    def _say(self, **what: Any) -> None:
        self.notifications.append(pb.Notification(log=self.log, sequence=len(self.notifications) + 1, **what))

    async def Join(self, request: pb.JoinRequest, _: Any) -> pb.JoinReply:
        self.joins += 1
        return pb.JoinReply(
            state=pb.JoinReply.STATE_READY,
            run="played",
            generation=1,
            incarnation=1,
            token=b"as by HMAC: the same again",
            fingerprint=self._layout.fingerprint,
            settings=pb.RunSettings(fragments=FRAGMENTS, codec=pb.CODEC_INT4, inner_steps=4),
            versions={index: len(fragment.versions) - 1 for index, fragment in self.fragments.items()},
            shards=self.places,
        )

    async def Follow(self, request: pb.FollowRequest, _: Any) -> AsyncIterator[pb.Notification]:
        self.follows.append(request.shard)
        position = request.sequence if request.log == self.log else -1
        if position < 0:
            position = len(self.notifications)
            versions = {index: len(fragment.versions) - 1 for index, fragment in self.fragments.items()}
            yield pb.Notification(log=self.log, sequence=position, current=pb.FullState(versions=versions))
        while True:
            await asyncio.sleep(0.02)
            while position < len(self.notifications):
                yield self.notifications[position]
                position += 1

    async def Report(self, requests: AsyncIterator[pb.Progress], _: Any) -> pb.ReportReply:
        async for told in requests:
            self.adopted |= {adopted.fragment for adopted in told.adopted}
            self.heard_fragments |= {adopted.fragment for adopted in told.adopted}
            self.heard_fragments |= {declined.fragment for declined in told.declined}
        return pb.ReportReply()

    async def Push(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[pb.PushReply]:
        header: pb.PushHeader = (await anext(requests)).header
        fragment = self.fragments.get(header.fragment)
        if fragment is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "of another shard", ATOLL_STATUS)
        yield pb.PushReply(received=pb.ReceivedFrames())
        if header.control_only:
            while fragment.newest.seq < header.seq:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.01)
            yield pb.PushReply(receipt=fragment.newest)
            return
        async for message in requests:
            came = [frame.index for frame in frame_messages.frames_in(message)]
            fragment.came[header.seq].update(came)
            if len(fragment.came[header.seq]) == header.frames and fragment.newest.seq < header.seq:
                self._merge(header.fragment, fragment, header.seq)
            yield pb.PushReply(received=pb.ReceivedFrames(frames=came))

    def _merge(self, index: int, fragment: Fragment, seq: int) -> None:
        spans, before = self._layout.fragments[index].frames, fragment.versions[-1]
        version = len(fragment.versions)
        change = np.full(len(before), 0.125 * self.logs, np.float32)
        payloads = [frame_codec.encode_frame(change, span, Codec.INT4) for span in spans]
        after = np.empty_like(before)
        for span, payload in zip(spans, payloads, strict=True):
            content = frame_codec.decompress(payload, span, Codec.INT4)
            frame_codec.content_advance(content, span, Codec.INT4, before, after)
        fragment.newest = pb.Receipt(
            learner="one", incarnation=1, fragment=index, seq=seq, fate=pb.FATE_MERGED, version=version
        )
        fragment.versions.append(after)
        fragment.updates.append((payloads, [fragment.newest]))
        self._say(published=pb.UpdatePublished(fragment=index, version=version))

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[Any]:
        fragment = self.fragments[request.fragment]
        version = len(fragment.versions) - 1 if request.whole else request.version
        spans, kind = self._layout.fragments[request.fragment].frames, Codec.INT4
        payloads, receipts = fragment.updates[version]
        if request.whole:
            kind = Codec.FLOAT32
            payloads = [frame_codec.encode_frame(fragment.versions[version], span, kind) for span in spans]
            receipts = [fragment.newest]
        header = pb.FetchHeader(
            fragment=request.fragment, version=version, codec=int(kind), frames=len(spans),
            size_bytes=sum(map(len, payloads)),
            crc32c=frame_codec.vector_crc32c(fragment.versions[version]), receipts=receipts,
        )  # fmt: skip
        yield pb.FetchReply(header=header)
        for index in () if request.header_only else request.frames:
            yield frame_messages.encode(index, crc32c(payloads[index]), payloads[index])

    async def Leave(self, _: pb.LeaveRequest, __: Any) -> pb.LeaveReply:
        return pb.LeaveReply()


class World:
    """Two shards, and one learner that joins at the first shard."""

    def __init__(
        self, loop: VirtualLoop, near: Sequence[int], far: Sequence[int], address: str, *, fronts: int
    ) -> None:
        self.network = Network(loop, lambda *_: None)
        self.network.weather = Weather(long_delay=0.0, cut=0.0, replay=0.0, change=0.0)
        layout = plan(TENSORS, FRAGMENTS)
        self.near = PlayedShard(self.network, "localhost:1", layout, near)
        self.far = PlayedShard(self.network, "localhost:2", layout, far)
        self.near.places = [pb.ShardPlace(fragments=near), pb.ShardPlace(address=address, fragments=far)]
        self.seen: Any = Seen()
        self.fronts: list[Process] = []
        self.routes: list[Routes] = []
        at = self.near.address
        for number in range(fronts):
            at, core = f"localhost:{3 + number}", at
            self.fronts.append(Process(at))
            self.fronts[-1].start(self._pass_on(at, core, self.fronts[-1]))
        self.learner = Island(self.network, self.seen, "one", 1, [at], STEP_S, 1)

    async def _pass_on(self, address: str, core: str, process: Process) -> None:
        clock = self.network.loop.clock
        routes = Routes(core, LOCAL, clock, lambda address, *_: SimulatedLink(self.network, process, address))
        metrics = FrontMetrics("here")
        service = FrontService(routes, metrics, 1 << 20, Answering(routes, metrics, AuditLog(None, clock)))
        self.network.servers[address] = (service, process)
        self.routes.append(routes)
        await routes.watch()

    async def gained(self, seconds: float) -> dict[int, int]:
        """Returns how many versions the learner gains in this time, by fragment."""
        before = defaultdict(int, self.seen.versions)
        await asyncio.sleep(seconds)
        assert self.learner.error is None
        return {fragment: version - before[fragment] for fragment, version in self.seen.versions.items()}


def played(
    story: Callable[[World], Coroutine[Any, Any, None]],
    near: Sequence[int] = NEAR, far: Sequence[int] = FAR, address: str = "localhost:2", *, fronts: int = 0,
) -> None:  # fmt: skip
    loop = VirtualLoop(random.Random(1))
    with determinism(loop), ExitStack() as stack:
        stack.callback(structlog.configure, **structlog.get_config())
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        asyncio.set_event_loop(loop)

        async def told() -> None:
            world = World(loop, near, far, address, fronts=fronts)
            try:
                await story(world)
            finally:
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
                await asyncio.sleep(1.0)

        try:
            loop.run_until_complete(told())
            assert not loop.unhandled
        finally:
            loop.close()
            asyncio.set_event_loop(None)


def moved(gained: dict[int, int]) -> set[int]:
    return {fragment for fragment, versions in gained.items() if versions >= 3}


def test_a_learner_connects_to_both_shards_and_reports_to_each_its_own_fragments():
    async def story(world: World) -> None:
        assert moved(await world.gained(20.0)) == {*NEAR, *FAR}
        assert (world.near.follows, world.far.follows) == ([0], [1])
        assert (world.near.adopted, world.far.adopted) == (set(NEAR), set(FAR))
        assert world.near.heard_fragments <= set(NEAR)
        assert world.far.heard_fragments <= set(FAR)
        assert (world.near.joins, world.far.joins) == (1, 0)

    played(story)


def test_a_dead_shard_stalls_its_own_fragments_and_reconnects_without_a_join():
    async def story(world: World) -> None:
        await world.gained(10.0)
        world.far.kill()
        await asyncio.sleep(3.0)
        gained = await world.gained(20.0)
        assert moved(gained) == set(NEAR)
        assert all(gained[fragment] == 0 for fragment in FAR)
        assert not world.learner.counters.connected
        world.far.begin()
        assert moved(await world.gained(30.0)) == {*NEAR, *FAR}
        assert world.learner.counters.connected
        assert (world.near.joins, len(world.near.follows)) == (1, 1)

    played(story)


def test_the_shard_of_the_join_may_die_while_the_other_shard_continues():
    async def story(world: World) -> None:
        await world.gained(10.0)
        world.near.kill()
        await asyncio.sleep(3.0)
        gained = await world.gained(20.0)
        assert moved(gained) == set(FAR)
        assert all(gained[fragment] == 0 for fragment in NEAR)
        world.near.begin()
        assert moved(await world.gained(30.0)) == {*NEAR, *FAR}
        assert (world.near.joins, len(world.far.follows)) == (2, 1)

    played(story)


@pytest.mark.parametrize("fronts", [1, 2])
def test_a_front_routes_by_fragment_and_hides_the_shards(fronts):
    async def story(world: World) -> None:
        assert moved(await world.gained(20.0)) == {*NEAR, *FAR}
        shards = world.learner.session.core.shards
        assert [(shard.address, shard.link.address) for shard in shards] == [("", f"localhost:{2 + fronts}")] * 2
        assert (world.near.follows, world.far.follows) == ([0], [1])
        assert (world.near.adopted, world.far.adopted) == (set(NEAR), set(FAR))
        assert world.near.heard_fragments <= set(NEAR)
        assert world.far.heard_fragments <= set(FAR)
        session, now = world.learner.session.core.session, world.network.loop.now
        for routes in world.routes:
            assert routes.up
            for number, owned in enumerate((NEAR, FAR)):
                shard = routes.numbered(session, number)
                assert shard.sessions.known(session, now)
                assert {fragment for _, _, fragment in shard.newest} == set(owned), "shards share no log"

    played(story, fronts=fronts)


@pytest.mark.parametrize("fronts", [1, 2])
def test_a_dead_shard_behind_a_front_stalls_only_its_own_fragments(fronts):
    async def story(world: World) -> None:
        await world.gained(10.0)
        world.far.kill()
        await asyncio.sleep(3.0)
        gained = await world.gained(20.0)
        assert moved(gained) == set(NEAR)
        assert all(gained[fragment] == 0 for fragment in FAR)
        assert not world.routes[0].up, "the first front calls the shards"
        world.far.begin()
        assert moved(await world.gained(30.0)) == {*NEAR, *FAR}
        assert all(routes.up for routes in world.routes)
        assert world.near.joins == 1

    played(story, fronts=fronts)


def test_a_learner_follows_a_shard_that_was_restored_from_a_backup():
    async def story(world: World) -> None:
        await world.gained(20.0)
        world.far.kill()
        await asyncio.sleep(3.0)
        world.far.forget(2)
        world.far.begin()
        assert moved(await world.gained(40.0)) >= set(NEAR)
        for index, fragment in world.far.fragments.items():
            version = world.seen.versions[index]
            assert version >= len(fragment.versions) - 2
            np.testing.assert_array_equal(world.seen.anchors[index], fragment.versions[version])
        assert [track.setbacks for track in world.learner.session.core.tracks.values()] == [0, 1, 0, 1]
        assert world.near.joins == 1

    played(story)


@pytest.mark.parametrize("far", [(1, 2, 3), (1,), (1, 3, 4), ()])
def test_shards_that_do_not_own_each_fragment_once_are_refused(far):
    refused(far, "localhost:2", "an invalid division of 4 fragments among")


def test_a_learner_does_not_call_a_shard_in_plain_text_over_a_network():
    refused(FAR, "192.0.2.1:7070", "cannot call a shard of the run")


@pytest.mark.parametrize("address", ["\n192.0.2.1:7070", "localhost:1\u2028", "a" * 300 + ":7070"])
def test_an_invalid_shard_address_is_refused(address):
    refused(FAR, address, "which is invalid")


def refused(far: Sequence[int], address: str, why: str) -> None:
    async def story(world: World) -> None:
        await asyncio.sleep(5.0)
        assert isinstance(world.learner.error, LearnerError)
        assert why in str(world.learner.error)
        assert str(world.learner.error).isprintable()
        assert len(str(world.learner.error)) < 300

    played(story, NEAR, far, address)
