"""Interrupted uploads continue over any number of streams, and are acknowledged once."""

from __future__ import annotations

import queue
import sys

import grpc
import numpy as np
import pytest
from atoll.demo import processes
from atoll.model.parameters import Parameters
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.contract import PROTOCOL, tensor_message
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FRAME_PARAMETERS, plan
from torch import nn
from torch.optim import SGD

from benchmarks.process_state import metrics
from tests.end_to_end.test_refusals import taken_over
from tests.end_to_end.world import Core, Trainee, core, eventually

METRICS_PORT = processes.free_port()


class Large(nn.Module):
    """A model with one fragment of three frames."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(FRAME_PARAMETERS // 400, 1000, bias=False)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    metrics = ("--metrics-listen", f"127.0.0.1:{METRICS_PORT}")
    with core(tmp_path_factory.mktemp("core"), "--fragments", "1", *metrics) as it:
        first = Trainee(it.address, "first", lambda _: True, model=Large())
        first.start()
        first.done()
        yield it


class Push:
    """One Push stream, whose messages the test sends one by one."""

    def __init__(self, stub, *messages: pb.PushRequest) -> None:
        self._messages: queue.Queue[pb.PushRequest | None] = queue.Queue()
        self.send(*messages)
        self.call = stub.Push(iter(self._messages.get, None), timeout=20)

    def send(self, *messages: pb.PushRequest) -> None:
        for message in messages:
            self._messages.put(message)

    def end(self) -> None:
        self._messages.put(None)

    def receipt(self) -> pb.Receipt:
        return next(reply.receipt for reply in self.call if reply.HasField("receipt"))

    def cut(self) -> None:
        self.call.cancel()
        self._messages.put(None)


def prepared(stub, name: str) -> tuple[pb.PushRequest, list[pb.PushRequest]]:
    model = Large()
    tensors = Parameters(model, SGD(model.parameters(), 0.1)).tensors
    digest = Parameters(model, SGD(model.parameters(), 0.1)).frozen_digest()
    request = pb.JoinRequest(
        protocol=PROTOCOL, learner=name, nonce=7, tensors=[tensor_message(t) for t in tensors], frozen_digest=digest
    )
    reply = stub.Join(request, timeout=20)
    session = pb.Session(
        run=reply.run, learner=name, incarnation=reply.incarnation, generation=reply.generation, token=reply.token
    )
    fragment = plan(tensors, 1).fragments[0]
    vector = np.random.default_rng(1).standard_normal(fragment.length).astype(np.float32)
    payloads = [frame_codec.encode_frame(vector, span, Codec.INT4) for span in fragment.frames]
    table = [(len(p), crc32c(p)) for p in payloads]
    header = pb.PushHeader(
        session=session, fragment=0, seq=1, base_version=reply.versions[0], tokens=10, steps=1, codec=pb.CODEC_INT4,
        frames=len(payloads), size_bytes=sum(map(len, payloads)), digest=frame_codec.frames_digest(table),
    )  # fmt: skip
    frames = [pb.PushRequest(frames=[pb.Frame(index=n, crc32c=table[n][1], payload=p)]) for n, p in enumerate(payloads)]
    return pb.PushRequest(header=header), frames


def accepted(running: Core) -> int:
    return running.status().contributions.accepted


def test_a_cut_upload_continues_with_the_missing_frames(running):
    before = accepted(running)
    with running.outer() as stub:
        header, frames = prepared(stub, "cut")
        first = Push(stub, header, frames[0], frames[2])
        assert list(next(first.call).received.frames) == []
        received: list[int] = []

        def resumed() -> bool:
            probe = Push(stub, header)
            received[:] = next(probe.call).received.frames
            probe.cut()
            return received == [0, 2]

        eventually(resumed)
        first.cut()
        second = Push(stub, header)
        assert list(next(second.call).received.frames) == [0, 2]
        second.send(frames[1])
        assert second.receipt().fate == pb.FATE_PENDING
    assert accepted(running) == before + 1


def test_wan_bytes_of_initial_parameters_and_cut_uploads_count_on_arrival(running):
    def up() -> float:
        return metrics(METRICS_PORT).total("atoll_wan_bytes_total", direction="up", region="")

    before = up()
    assert before > 4 * sum(p.numel() for p in Large().parameters()), (
        "the initial parameters and the first contributions must count"
    )
    with running.outer() as stub:
        header, frames = prepared(stub, "counted")
        pushed = Push(stub, header, frames[0])
        eventually(lambda: up() == before + len(frames[0].frames[0].payload))
        pushed.cut()


def test_frames_over_two_streams_make_one_contribution_and_both_have_its_receipt(running):
    before = accepted(running)
    with running.outer() as stub:
        header, frames = prepared(stub, "striped")
        one, two = Push(stub, header), Push(stub, header)
        for stream in (one, two):
            next(stream.call)
        one.send(frames[0], frames[1])
        one.end()
        two.send(frames[0], frames[2])
        two.end()
        assert {stream.receipt().fate for stream in (one, two)} <= {pb.FATE_PENDING, pb.FATE_MERGED}
    assert accepted(running) == before + 1


def test_every_stream_of_an_upload_gets_the_error_of_an_invalid_frame(running):
    with running.outer() as stub:
        header, _ = prepared(stub, "wrong")
        offer = Push(stub, header)
        next(offer.call)
        offer.end()
        garbage = b"no frame"
        frame = pb.Frame(index=0, crc32c=crc32c(garbage), payload=garbage)
        one = Push(stub, header, pb.PushRequest(frames=[frame]))
        for stream in (one, offer):
            with pytest.raises(grpc.RpcError) as caught:
                stream.receipt()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_hears_which_frames_arrived_while_others_are_missing(running):
    with running.outer() as stub:
        header, frames = prepared(stub, "told")
        push = Push(stub, header)
        assert list(next(push.call).received.frames) == []
        push.send(frames[1])
        push.send(frames[0])
        push.end()
        told: set[int] = set()
        while told != {0, 1}:
            told |= set(next(push.call).received.frames)
        push.cut()


def test_a_lost_acknowledgement_is_repeated(running):
    before = accepted(running)
    with running.outer() as stub:
        header, frames = prepared(stub, "lost")
        first = Push(stub, header, *frames)
        next(first.call)
        eventually(lambda: accepted(running) == before + 1)
        first.cut()
        again = Push(stub, header)
        assert again.receipt().fate in {pb.FATE_PENDING, pb.FATE_MERGED}
    assert accepted(running) == before + 1


def test_a_dead_incarnations_unfinished_upload_does_not_block_the_new_one(running):
    before = accepted(running)
    with running.outer() as stub:
        header, frames = prepared(stub, "dead")
        first = Push(stub, header, frames[0])
        next(first.call)
        first.cut()
        reply = taken_over(stub, _join_of(header))
        header.header.session.incarnation, header.header.session.token = reply.incarnation, reply.token
        second = Push(stub, header, *frames)
        assert list(next(second.call).received.frames) == []
        assert second.receipt().incarnation == 2
        header.header.session.incarnation = 1
        third = Push(stub, header)
        with pytest.raises(grpc.RpcError, match="fenced off"):
            next(third.call)
    assert accepted(running) == before + 1


def test_a_dead_incarnations_stream_cannot_complete_its_upload(running):
    before = accepted(running)
    with running.outer() as stub:
        header, frames = prepared(stub, "zombie")
        zombie = Push(stub, header, frames[0])
        next(zombie.call)
        taken_over(stub, _join_of(header))
        zombie.send(*frames[1:])
        with pytest.raises(grpc.RpcError, match="fenced off"):
            next(zombie.call)
    assert accepted(running) == before


def _join_of(header: pb.PushRequest) -> pb.JoinRequest:
    model = Large()
    mine = Parameters(model, SGD(model.parameters(), 0.1))
    return pb.JoinRequest(
        protocol=PROTOCOL, learner=header.header.session.learner, nonce=8,
        tensors=[tensor_message(t) for t in mine.tensors], frozen_digest=mine.frozen_digest(),
    )  # fmt: skip


def test_finished_calls_free_their_streams_of_the_connection(tmp_path, monkeypatch):
    """A connection allows 64 streams, and garbage collection may be late."""
    without = "import gc; gc.disable(); from atoll.cli import main; main()"
    monkeypatch.setattr(processes, "ATOLL", [sys.executable, "-c", without])
    with core(tmp_path, "--fragments", "1") as running, running.outer() as stub:
        first = Trainee(running.address, "first", lambda _: True, model=Large())
        first.start()
        first.done()
        header, frames = prepared(stub, "often")
        push = Push(stub, header, *frames)
        assert next(push.call).WhichOneof("what") == "received"
        assert push.receipt().fate == pb.FATE_PENDING
        push.cut()
        for _ in range(80):
            again, headless = Push(stub, header), Push(stub, frames[0])
            assert again.receipt().seq == 1
            with pytest.raises(grpc.RpcError) as error:
                next(headless.call)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            again.cut()
            headless.cut()
