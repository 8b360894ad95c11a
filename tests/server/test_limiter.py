"""The limiter with real gRPC: it refuses only calls above a limit."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from atoll_server.access.quotas import Quotas
from atoll_server.access.revocations import RevokedCertificates
from atoll_server.rpc.calls import message_options
from atoll_server.rpc.limiter import CallLimiter
from atoll_server.telemetry.metrics import Metrics
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import FrameStub, frames_in
from atoll_wire.messages.message_parts import MESSAGE_BYTES, PART_BYTES
from atoll_wire.process.clock import SYSTEM

WRONG = 66  # a wrong checksum
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class Service(rpc.OuterServicer):
    """A service that accepts all messages. heard: number of reports. fetched: bytes of the frame in its answer."""

    def __init__(self) -> None:
        self.heard, self.fetched, self.joined = 0, 10, pb.JoinRequest()

    async def Join(self, request, _):
        self.joined = request
        return pb.JoinReply(run="here")

    async def LeaseUnits(self, request, _):
        return pb.LeaseUnitsReply()

    async def Report(self, requests, _):
        async for _ in requests:
            self.heard += 1
        return pb.ReportReply()

    async def Push(self, requests, context):
        async for request in requests:
            if any(frame.crc32c == WRONG for frame in frames_in(request)):
                await context.abort(grpc.StatusCode.DATA_LOSS, "a wrong checksum")
            brought = [frame.index for frame in frames_in(request)]
            yield pb.PushReply(received=pb.ReceivedFrames(frames=brought))

    async def Fetch(self, request, _):
        yield pb.FetchReply(header=pb.FetchHeader(frames=1))
        for _ in range(200 if request.whole else 1):
            yield frame_messages.encode(7, 1, bytes(self.fetched))


@contextlib.asynccontextmanager
async def served(**changes):
    """Yields a stub, the service, and the counts by limit."""
    metrics, service = Metrics(), Service()
    vouched = lambda _, session: session.learner  # noqa: E731
    revoked = RevokedCertificates(None)
    gate = CallLimiter(Quotas(**changes), vouched, metrics.limited, lambda *_: None, SYSTEM, revoked)
    server = grpc.aio.server(options=message_options(Quotas().window_bytes, MESSAGE_BYTES), interceptors=[gate])
    frame_messages.serve(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    count = lambda limit: metrics.limited.labels(limit)._value.get()  # noqa: E731
    # A fixed window, because gRPC's own window grows while the message is not read.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield FrameStub(channel), service, count
    await server.stop(0)


def session(name: str) -> pb.Session:
    return pb.Session(learner=name)


async def ends(call, code, saying: str) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    assert (await call.code(), saying in await call.details()) == (code, True), await call.details()


async def push(stub, name: str):
    """Returns a stream whose first message has been received."""
    call = stub.Push()
    await call.write(pb.PushRequest(header=pb.PushHeader(session=session(name))))
    assert (await call.read()).HasField("received")
    return call


def test_messages_of_any_size_pass_in_pieces():
    async def scene():
        async with served() as (stub, service, _):
            tensors = [pb.Tensor(name=f"{n}." + 60 * "x") for n in range(20_000)]
            await stub.Join(pb.JoinRequest(learner="a", tensors=tensors))
            assert service.joined.tensors == tensors
            assert service.joined.ByteSize() > 2 * PART_BYTES
            call = await push(stub, "a")
            await call.write(frame_messages.encode(3, 1, bytes(2 << 20)))
            assert (await call.read()).received.frames == [3]
            service.fetched = 2 << 20
            header, frame = [reply async for reply in stub.Fetch(pb.FetchRequest(session=session("a")))]
            assert header.HasField("header")
            assert len(frame[0].payload) == 2 << 20

    asyncio.run(scene())


def test_pieces_beyond_the_limit_are_refused():
    async def scene():
        async with served(joining_bytes=2 * PART_BYTES) as (stub, _, _):
            request = pb.JoinRequest(frozen_digest=bytes(3 * PART_BYTES))
            with pytest.raises(grpc.aio.AioRpcError, match="in total") as error:
                await stub.Join(request)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scene())


def test_joins_of_many_tensors_are_taken_at_their_rate():
    async def scene():
        async with served(joins_per_s=10.0, joins_burst=2.0) as (stub, _, count):
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(stub.Join(pb.JoinRequest(frozen_digest=bytes(2 * PART_BYTES))) for _ in range(8)))
            assert count("joins_per_s") == 6
            assert asyncio.get_running_loop().time() - began > 0.55
            for _ in range(20):
                await stub.Join(pb.JoinRequest(learner="a"))
            assert count("joins_per_s") == 6, "small Joins must not count"

    asyncio.run(scene())


def test_a_learner_whose_checksums_are_wrong_waits_and_others_do_not():
    async def scene():
        async with served(spoilt_per_s=0.01, spoilt_burst=3.0) as (stub, _, count):
            for _ in range(3):
                call = await push(stub, "a")
                await call.write(frame_messages.encode(0, WRONG, b"x"))
                await ends(call, grpc.StatusCode.DATA_LOSS, "wrong checksum")
            assert count("spoilt_per_s") == 0
            call = await push(stub, "a")
            await call.write(frame_messages.encode(0, WRONG, b"x"))
            await ends(call, grpc.StatusCode.DATA_LOSS, "wrong checksum")
            again = stub.Push()
            await again.write(pb.PushRequest(header=pb.PushHeader(session=session("a"))))
            await ends(again, EXHAUSTED, "wrong checksums")
            assert count("spoilt_per_s") == 1
            await push(stub, "b")

    asyncio.run(scene())


def test_a_learners_newest_streams_run_and_its_oldest_end():
    async def scene():
        async with served(pushes=3) as (stub, _, count):
            other = await push(stub, "b")
            mine = [await push(stub, "a") for _ in range(4)]
            await ends(
                mine[0], EXHAUSTED, "(limit: 3 per caller): keep fewer open, or raise the server's --quota-pushes"
            )
            assert count("streams") == 1
            for call in (*mine[1:], other):
                await call.write(frame_messages.encode(1, 1, b"x"))
                assert (await call.read()).received.frames == [1]

    asyncio.run(scene())


def test_a_call_that_says_nothing_makes_room_for_one_that_does():
    async def scene():
        async with served(first_calls=2, fresh_s=0.0) as (stub, _, count):
            silent = [stub.Push() for _ in range(2)]
            waiting = [asyncio.create_task(ends(call, EXHAUSTED, "without a first message")) for call in silent]
            while not any(task.done() for task in waiting):
                with contextlib.suppress(grpc.aio.AioRpcError):  # the first attempt must not wait, either
                    await push(stub, "a")
            assert [task.exception() for task in waiting if task.done()] == [None]
            assert count("first_message") >= 1
            for task in waiting:
                task.cancel()

    asyncio.run(scene())


def test_a_call_without_a_first_message_in_time_ends():
    async def scene():
        async with served(first_message_s=0.05) as (stub, _, count):
            await ends(stub.Push(), EXHAUSTED, "first message did not arrive")
            assert count("first_message") == 1

    asyncio.run(scene())


def test_reports_are_accepted_at_their_rate_and_none_is_lost():
    async def scene():
        async with served(reports_per_s=100.0, reports_burst=5.0) as (stub, service, count):
            began = asyncio.get_running_loop().time()
            await stub.Report(iter([pb.Progress(session=session("a"))] * 40))
            assert service.heard == 40
            assert asyncio.get_running_loop().time() - began > 0.3
            assert count("messages_per_s") > 20

    asyncio.run(scene())


def test_calls_that_would_wait_too_long_are_refused():
    async def scene():
        async with served(calls_per_s=1.0, calls_burst=2.0, max_wait_s=0.0) as (stub, _, count):
            made = [stub.Fetch(pb.FetchRequest(session=session("a"))) for _ in range(4)]
            refused = 0
            for call in made:
                try:
                    assert len([reply async for reply in call]) == 2
                except grpc.aio.AioRpcError as error:
                    assert error.code() is EXHAUSTED
                    refused += 1
            assert refused == count("calls_per_s") == 2

    asyncio.run(scene())


def test_requests_for_data_units_have_a_rate_of_their_own():
    async def scene():
        async with served(leases_per_s=1.0, leases_burst=2.0, max_wait_s=0.0) as (stub, _, count):
            for _ in range(2):
                await stub.LeaseUnits(pb.LeaseUnitsRequest(session=session("a")))
            with pytest.raises(grpc.aio.AioRpcError, match="requests for data units arrive faster than the limit"):
                await stub.LeaseUnits(pb.LeaseUnitsRequest(session=session("a")))
            await stub.LeaseUnits(pb.LeaseUnitsRequest(session=session("b")))
            assert count("messages_per_s") == 1

    asyncio.run(scene())


def test_only_a_stalled_reader_is_disconnected():
    async def scene():
        async with served(stalled_s=0.3) as (stub, service, count):
            service.fetched = 100_000
            check_current = stub.Fetch(pb.FetchRequest(session=session("a"), whole=True))
            await check_current.read()
            while not count("stalled"):  # noqa: ASYNC110 - gRPC's own thread sends no event
                await asyncio.sleep(0.01)
            reading = stub.Fetch(pb.FetchRequest(session=session("a"), whole=True))
            assert len([reply async for reply in reading]) == 201

    asyncio.run(scene())
