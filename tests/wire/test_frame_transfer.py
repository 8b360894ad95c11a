"""Frames over several connections: a slow or failing connection does not delay frames of others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections import frame_transfer
from atoll_wire.connections.calls import LinkLost
from atoll_wire.connections.connection_pool import ConnectionPool
from atoll_wire.connections.link import Transfers
from atoll_wire.connections.parallel_connections import SLOTS, ParallelConnections
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import EncodedFrame
from atoll_wire.process.clock import SYSTEM

FRAMES = 5
UPLOADS = 2  # uploads at a time
MESSAGES = {n: EncodedFrame.of(n, 0, [bytes([n])]) for n in range(FRAMES)}
HEADER = pb.PushHeader(fragment=0, seq=1, frames=FRAMES)
RECEIPT = pb.PushReply(receipt=pb.Receipt(seq=1, fate=pb.FATE_PENDING))
WAIT_S = 10.0


class Core:
    """Accepts frames over any number of calls. stuck: calls over which no frame arrives."""

    def __init__(
        self, *stuck: int, fails: int | None = None, swallows: int | None = None, dead: tuple[int, ...] = ()
    ) -> None:
        self.stuck, self.fails, self.swallows, self.dead = stuck, fails, swallows, dead
        self.received: set[int] = set()
        self.calls: list[Call] = []
        self.lanes = 0
        up = ParallelConnections(self._dial, SYSTEM)
        up._width.lanes, up._capacity, up._turns = 2, 2 * SLOTS, asyncio.Semaphore(2 * SLOTS)
        offers = ConnectionPool(lambda: (SimpleNamespace(Push=lambda: Call(self, None)), SimpleNamespace()), SYSTEM, 1)
        self.link = SimpleNamespace(
            up=up,
            offers=offers,
            upload_slots=asyncio.Semaphore(UPLOADS),
            transfers=Transfers(SYSTEM),
            answered=lambda _seconds: None,
            look=lambda: None,
            clock=SYSTEM,
        )

    def _dial(self):
        carrier = self.lanes
        self.lanes += 1
        return SimpleNamespace(Push=lambda: Call(self, carrier)), SimpleNamespace()

    def take(self, index: int) -> None:
        self.received.add(index)
        if len(self.received) == FRAMES:
            for call in self.calls:
                call.replies.put_nowait(RECEIPT)


class Call:
    """One Push call."""

    def __init__(self, core: Core, carrier: int | None) -> None:
        self.core, self.carrier = core, carrier
        self.replies: asyncio.Queue[pb.PushReply | None] = asyncio.Queue()
        self.failed = False
        core.calls.append(self)

    async def write(self, message) -> None:
        if self.carrier in self.core.dead:
            self.failed = True
            self.replies.put_nowait(None)
            raise asyncio.InvalidStateError
        if isinstance(message, pb.PushRequest):
            received = sorted(self.core.received)
            self.replies.put_nowait(
                RECEIPT if len(received) == FRAMES else pb.PushReply(received=pb.ReceivedFrames(frames=received))
            )
            return
        assert self.carrier is not None, "offers must carry no frames"
        if self.carrier in self.core.stuck:
            await asyncio.Event().wait()
        if self.carrier == self.core.swallows:
            await asyncio.sleep(0)
            return
        indices = [frame.index for frame in frame_messages.push_request(message)]
        if self.core.fails in indices:
            self.failed = True
            self.replies.put_nowait(None)
            raise asyncio.InvalidStateError
        await asyncio.sleep(0)
        self.replies.put_nowait(pb.PushReply(received=pb.ReceivedFrames(frames=indices)))
        for index in indices:
            self.core.take(index)

    async def read(self):
        reply = await self.replies.get()
        if self.failed and reply is None:
            raise grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata())
        if reply is None and asyncio.current_task() is not None:
            raise asyncio.CancelledError  # like gRPC for a cancelled call
        return grpc.aio.EOF if reply is None else reply

    async def done_writing(self) -> None:
        pass

    def add_done_callback(self, callback) -> None:
        pass  # open calls are not counted

    def cancel(self) -> bool:
        self.replies.put_nowait(None)
        return True


def uploaded(core: Core) -> tuple[pb.Receipt | None, list[int]]:
    """Returns the answer, and the frames that were passed to gRPC."""
    sent: list[int] = []

    async def main() -> pb.Receipt | None:
        return await asyncio.wait_for(frame_transfer.upload(core.link, lambda: HEADER, MESSAGES, sent.append), WAIT_S)

    return asyncio.get_event_loop_policy().new_event_loop().run_until_complete(main()), sent


def test_all_frames_arrive_once_over_connections_that_work():
    receipt, sent = uploaded(core := Core())
    assert (receipt.fate, sorted(sent), core.lanes) == (pb.FATE_PENDING, list(range(FRAMES)), 2)


def test_frames_on_a_stuck_connection_are_sent_again_over_another():
    receipt, sent = uploaded(core := Core(0))
    assert receipt.fate == pb.FATE_PENDING
    assert (core.received, sorted(sent)) == (set(range(FRAMES)), list(range(FRAMES)))


def test_frames_lost_on_a_connection_are_sent_once_more():
    receipt, _ = uploaded(core := Core(swallows=0))
    assert (receipt.fate, core.received) == (pb.FATE_PENDING, set(range(FRAMES)))


def test_one_dead_connection_of_two_delays_no_frame():
    receipt, _ = uploaded(core := Core(dead=(1,)))
    assert (receipt.fate, core.received) == (pb.FATE_PENDING, set(range(FRAMES)))


def test_an_upload_ends_with_the_reason_if_every_connection_is_dead():
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        uploaded(Core(dead=(0, 1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stream_that_fails_ends_the_upload_with_its_reason():
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        uploaded(Core(fails=3))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_only_a_few_uploads_are_offered_at_a_time():
    core = Core()
    offered = core.link.offers

    async def main() -> None:
        def begin() -> pb.PushHeader:
            begun.append(sum(each.busy for each in offered.connections))  # offers that are still open
            return HEADER

        begun: list[int] = []
        uploads = [frame_transfer.upload(core.link, begin, MESSAGES, lambda _: None) for _ in range(10 * UPLOADS)]
        await asyncio.wait_for(asyncio.gather(*uploads), WAIT_S)
        assert (len(begun), max(begun)) == (10 * UPLOADS, UPLOADS - 1)

    asyncio.run(main())


def test_a_failed_link_accepts_no_upload():
    core = Core()

    async def main() -> None:
        core.link.up.give_up()
        with pytest.raises(LinkLost):
            await frame_transfer.upload(core.link, lambda: HEADER, MESSAGES, lambda _: None)
        core.link.offers._closed = True
        with pytest.raises(LinkLost):
            await frame_transfer.upload(core.link, lambda: HEADER, MESSAGES, lambda _: None, known=True)

    asyncio.run(main())
