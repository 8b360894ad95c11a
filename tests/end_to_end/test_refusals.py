"""Invalid requests are refused with the right status and one line with the fix. The state does not change."""

from __future__ import annotations

import contextlib

import grpc
import numpy as np
import pytest
import zstandard
from atoll.model.parameters import Parameters
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.contract import PROTOCOL, tensor_message
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import plan
from atoll_wire.messages.frame_messages import FRAMES_PER_MESSAGE
from torch import nn
from torch.optim import SGD

from tests.end_to_end.world import Core, core, small_model, train


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with core(tmp_path_factory.mktemp("core")) as it:
        train(it.address, "a", "b", steps=60)
        yield it


def tensors(model: nn.Module | None = None) -> list[pb.Tensor]:
    model = model if model is not None else small_model()
    return [tensor_message(t) for t in Parameters(model, SGD(model.parameters(), 0.1)).tensors]


def digest() -> bytes:
    model = small_model()
    return Parameters(model, SGD(model.parameters(), 0.1)).frozen_digest()


class Hand:
    """A joined learner with which a test sends invalid requests."""

    def __init__(self, stub, name: str = "hand") -> None:
        self.stub = stub
        reply = stub.Join(request(name), timeout=20)
        self.session = pb.Session(
            run=reply.run, learner=name, incarnation=reply.incarnation, generation=reply.generation, token=reply.token
        )
        model = small_model()
        self.layout = plan(Parameters(model, SGD(model.parameters(), 0.1)).tensors, reply.settings.fragments)
        self.versions = dict(reply.versions)

    def push(self, change=lambda header, frames: None, seq: int = 1, sends=lambda messages: messages, timeout_s=20.0):
        """Sends a contribution for fragment 0, which `change` may make invalid. Returns the receipt."""
        fragment = self.layout.fragments[0]
        vector = np.full(fragment.length, 1e-4, np.float32)
        payloads = [frame_codec.encode_frame(vector, span, Codec.INT4) for span in fragment.frames]
        frames = [pb.Frame(index=n, crc32c=crc32c(p), payload=p) for n, p in enumerate(payloads)]
        table = [(len(p), crc32c(p)) for p in payloads]
        header = pb.PushHeader(
            session=self.session, fragment=0, seq=seq, cycle=0, base_version=self.versions[0], tokens=10, steps=1,
            codec=pb.CODEC_INT4, frames=len(frames), size_bytes=sum(map(len, payloads)), digest=frame_codec.frames_digest(table),
        )  # fmt: skip
        change(header, frames)
        messages = [pb.PushRequest(header=header), *(pb.PushRequest(frames=[frame]) for frame in frames)]
        return list(self.stub.Push(iter(sends(messages)), timeout=timeout_s))[-1].receipt


def request(name: str, **changes) -> pb.JoinRequest:
    fields = {
        "protocol": PROTOCOL,
        "learner": name,
        "nonce": abs(hash(name)) + 1,
        "tensors": tensors(),
        "frozen_digest": digest(),
    }
    return pb.JoinRequest(**(fields | changes))


@contextlib.contextmanager
def refused(running: Core, status: grpc.StatusCode, *words: str):
    """Context manager that expects a one-line refusal with this status and these words, and no other change."""
    before = running.status()
    with pytest.raises(grpc.RpcError) as caught:
        yield
    after = running.status()
    assert caught.value.code() is status, caught.value.details()
    for word in words:
        assert word in caught.value.details()
    assert "\n" not in caught.value.details()
    assert after.contributions.accepted == before.contributions.accepted
    assert [f.version for f in after.fragments] == [f.version for f in before.fragments]


def _rescale(header: pb.PushHeader, frames: list[pb.Frame], bits: int) -> None:
    content = bytearray(zstandard.decompress(frames[0].payload))
    content[-2:] = bits.to_bytes(2, "little")
    payload = zstandard.compress(bytes(content))
    frames[0].payload, frames[0].crc32c = payload, crc32c(payload)
    header.size_bytes = sum(len(f.payload) for f in frames)
    header.digest = frame_codec.frames_digest([(len(f.payload), f.crc32c) for f in frames])


def _set(**values):
    def change(header, frames):
        for name, value in values.items():
            setattr(header, name, value)

    return change


def _flip(header, frames):
    broken = bytearray(frames[0].payload)
    broken[len(broken) // 2] ^= 1
    frames[0].payload = bytes(broken)


def _junk(header, frames):
    frames[0].payload = b"junk" * 20
    frames[0].crc32c = crc32c(frames[0].payload)


def _bomb(header, frames):
    frames[0].payload = zstandard.compress(bytes(1 << 26))
    frames[0].crc32c = crc32c(frames[0].payload)


INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (_set(size_bytes=10**9), INVALID, ["declares", "at most"]),
        (_set(size_bytes=0), INVALID, ["declares"]),
        (_set(size_bytes=7), INVALID, ["more than its declared 7 bytes"]),
        (_set(frames=99), INVALID, ["declares 99 frames"]),
        (_set(tokens=0), INVALID, ["0 tokens"]),
        (_set(steps=0), INVALID, ["0 steps"]),
        (_set(steps=1 << 60), INVALID, ["steps"]),
        (_set(seq=1 << 63), INVALID, ["seq above"]),
        (_set(digest=b"short"), INVALID, ["digest of 5 bytes"]),
        (_set(digest=bytes(32)), INVALID, ["differ from the size or digest in its header"]),
        (_set(codec=pb.CODEC_FLOAT32), INVALID, ["uses codec number 1, but the run uses 3 (INT4)"]),
        (_set(fragment=77), INVALID, ["fragment 77 does not exist"]),
        (_set(base_version=10**6), grpc.StatusCode.OUT_OF_RANGE, ["is based on version 1000000", "after a restore"]),
        (_flip, grpc.StatusCode.DATA_LOSS, ["does not match its checksum", "send it again"]),
        (_junk, INVALID, ["not a zstd frame"]),
        (_bomb, INVALID, ["declares 67108864 bytes"]),
        (lambda h, f: h.session.ClearField("token"), grpc.StatusCode.UNAUTHENTICATED, ["join again"]),
        (lambda h, f: setattr(h.session, "learner", "nobody"), grpc.StatusCode.UNAUTHENTICATED, ['"nobody" has not joined']),
        (lambda h, f: setattr(h.session, "run", "other"), grpc.StatusCode.UNAUTHENTICATED, ["another run"]),
        (lambda h, f: f.__setitem__(0, pb.Frame(index=50)), INVALID, ["frame 50"]),
    ],
)  # fmt: skip
def test_an_unsound_contribution_is_turned_away(running, change, status, words):
    with running.outer() as stub:
        hand = Hand(stub)
        with refused(running, status, *words):
            hand.push(change)
    assert running.status().contributions.turned_away > 0


def test_a_stale_contribution_is_refused_with_the_advice_to_fetch_the_fragment_whole(running):
    with running.outer() as stub:
        hand = Hand(stub)
        assert hand.versions[0] > 4
        with refused(running, grpc.StatusCode.OUT_OF_RANGE, "fetch the whole fragment"):
            hand.push(_set(base_version=0), seq=2)


def test_the_same_key_with_another_digest_is_refused_and_with_the_same_is_answered_again(running):
    with running.outer() as stub:
        hand = Hand(stub, "twice")
        first = hand.push()
        assert first.fate == pb.FATE_PENDING
        assert hand.push().seq == first.seq
        with refused(running, grpc.StatusCode.ALREADY_EXISTS, "different digest"):
            hand.push(_set(digest=bytes(32)))
        with refused(running, INVALID, "older than"):
            hand.push(seq=0)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"learner": "no spaces allowed"}, INVALID, ["letters, digits"]),
        ({"learner": ""}, INVALID, ["letters, digits"]),
        ({"learner": "x" * 65}, INVALID, ["1 to 64"]),
        ({"region": "r" * 65}, INVALID, ["64 printable"]),
        ({"protocol": 99}, grpc.StatusCode.FAILED_PRECONDITION, ["protocol 99"]),
        ({"run": "another"}, grpc.StatusCode.FAILED_PRECONDITION, ["not another: correct the server address"]),
        ({"tensors": []}, INVALID, ["0 trainable tensors"]),
        ({"tensors": tensors(nn.Linear(3, 3))}, grpc.StatusCode.FAILED_PRECONDITION, ["a different model", 'missing "0.weight"']),
        ({"tensors": [pb.Tensor(name="n", shape=[1 << 60], dtype="float32", kind=1)]}, INVALID, ["parameters, but at most"]),
        ({"frozen_digest": b"other"}, grpc.StatusCode.FAILED_PRECONDITION, ["frozen parameters"]),
        ({"tensors": [pb.Tensor(name="n" * 600, shape=[1], dtype="float32", kind=1)]}, INVALID, ["has a name longer than 512 bytes"]),
        ({"tensors": [pb.Tensor(name="n", shape=[1] * 9, dtype="float32", kind=1)]}, INVALID, ["more than 8 dimensions"]),
        ({"tensors": [pb.Tensor(name="n", shape=[1], dtype="float32")]}, INVALID, ["does not declare its kind of merge"]),
    ],
)  # fmt: skip
def test_an_invalid_join_is_refused(running, change, status, words):
    with running.outer() as stub, refused(running, status, *words):
        stub.Join(_join(change), timeout=20)
    assert "odd" not in {each.learner for each in running.status().learners}


def _join(change) -> pb.JoinRequest:
    made = request("odd")
    for name, value in change.items():
        made.ClearField(name)
        if name == "tensors":
            made.tensors.extend(value)
        else:
            setattr(made, name, value)
    return made


def taken_over(stub, again: pb.JoinRequest) -> pb.JoinReply:
    """Takes over a disconnected process's name with a second Join."""
    challenge = stub.Join(again, timeout=20)
    assert challenge.state == pb.JoinReply.STATE_CONFIRM
    again.proof = challenge.token
    return stub.Join(again, timeout=20)


def test_an_older_incarnation_is_fenced_off(running):
    with running.outer() as stub:
        old = Hand(stub, "fenced")
        newer = taken_over(stub, request("fenced", nonce=5))
        assert newer.incarnation == old.session.incarnation + 1
        with refused(running, grpc.StatusCode.FAILED_PRECONDITION, "started again elsewhere"):
            old.push()
        with refused(running, grpc.StatusCode.FAILED_PRECONDITION, "started again elsewhere"):
            stub.Join(request("fenced", incarnation=old.session.incarnation), timeout=20)


def test_values_near_the_end_of_float32_are_refused_and_the_core_lives(tmp_path):
    with core(tmp_path, "--codec", "float32") as other, other.outer() as stub:
        train(other.address, "a", steps=30)
        hand = Hand(stub)

        def huge(header: pb.PushHeader, frames: list[pb.Frame]) -> None:
            header.codec = pb.CODEC_FLOAT32
            fragment = hand.layout.fragments[0]
            for span, frame in zip(fragment.frames, frames, strict=True):
                frame.payload = frame_codec.encode_frame(
                    np.full(fragment.length, 3e38, np.float32), span, Codec.FLOAT32
                )
                frame.crc32c = crc32c(frame.payload)
            header.size_bytes = sum(len(f.payload) for f in frames)
            header.digest = frame_codec.frames_digest([(len(f.payload), f.crc32c) for f in frames])

        receipt = hand.push(huge)
        assert (receipt.fate, receipt.drop_outstanding) == (pb.FATE_REFUSED, True)
        assert "norm is" in receipt.reason
        assert "diverged" in receipt.reason


def test_a_report_of_too_many_rounds_is_refused_before_it_is_parsed(running):
    with running.outer() as stub:
        hand = Hand(stub, "flood")
        declined = [pb.Declined(fragment=0, cycle=1)] * 10_000
        with refused(running, grpc.StatusCode.INVALID_ARGUMENT, "at most 256"):
            stub.Report(iter([pb.Progress(session=hand.session, declined=declined)]), timeout=20)


def test_a_leave_without_final_counts_keeps_the_reported_counts(running):
    with running.outer() as stub:
        hand = Hand(stub, "short")
        stub.Report(iter([pb.Progress(session=hand.session, tokens=500, steps=5)]), timeout=20)
        before = running.status().tokens_trained
        stub.Leave(pb.LeaveRequest(session=hand.session), timeout=20)
        assert running.status().tokens_trained == before >= 500


def test_a_retried_join_of_the_same_process_keeps_its_incarnation(running):
    with running.outer() as stub:
        assert Hand(stub, "again").session.incarnation == Hand(stub, "again").session.incarnation == 1


def test_initial_parameters_are_accepted_exactly_once(running):
    with running.outer() as stub:
        hand = Hand(stub)
        header = pb.InitialiseHeader(session=hand.session, size_bytes=3, sha256=bytes(32))
        messages = [pb.InitialiseRequest(header=header), pb.InitialiseRequest(chunk=b"abc")]
        with refused(running, grpc.StatusCode.UNAVAILABLE, "has its initial parameters"):
            stub.Initialise(iter(messages), timeout=20)


def test_an_upload_cannot_continue_under_another_header(running):
    with running.outer() as stub:
        hand = Hand(stub, "begun")
        with refused(running, INVALID, "frame 50"):
            hand.push(lambda _, frames: frames.__setitem__(0, pb.Frame(index=50)))
        with refused(running, grpc.StatusCode.ALREADY_EXISTS, "a different header"):
            hand.push(_set(tokens=10**9))
        assert hand.push().fate == pb.FATE_PENDING


@pytest.mark.parametrize("field", ["tokens", "steps", "abandoned_tokens"])
def test_a_report_beyond_possible_training_is_refused(running, field):
    with running.outer() as stub:
        hand = Hand(stub)
        report = pb.Progress(session=hand.session, **{field: (1 << 64) - 1})
        with refused(running, INVALID, "reports more than"):
            stub.Report(iter([report]), timeout=20)


def test_a_fetch_of_a_deleted_update_is_refused_with_the_advice_to_fetch_whole(running):
    with running.outer() as stub:
        hand = Hand(stub)
        with refused(running, grpc.StatusCode.NOT_FOUND, "fetch the whole fragment"):
            list(stub.Fetch(pb.FetchRequest(session=hand.session, fragment=0, version=10**6), timeout=20))


def test_a_message_above_the_limit_is_refused_before_it_is_parsed(running):
    with running.outer() as stub, refused(running, grpc.StatusCode.RESOURCE_EXHAUSTED):
        stub.Join(request("odd", region="r" * (17 << 20)), timeout=20)


@pytest.mark.parametrize("messages", [[], [pb.PushRequest(frames=[pb.Frame(index=0)])]])
def test_a_push_without_a_header_is_refused(running, messages):
    with running.outer() as stub, pytest.raises(grpc.RpcError) as caught:
        list(stub.Push(iter(messages), timeout=20))
    assert caught.value.code() in {INVALID, grpc.StatusCode.UNAUTHENTICATED}


@pytest.mark.parametrize("count", [0, FRAMES_PER_MESSAGE + 1])
def test_a_message_with_no_or_too_many_frames_is_refused(running, count):
    def at_once(messages):
        frames = [frame for message in messages for frame in message.frames]
        return [messages[0], pb.PushRequest(frames=(frames * count)[:count])]

    with running.outer() as stub, refused(running, INVALID, f"a Push message has {count} frames"):
        Hand(stub, f"crowded-{count}").push(sends=at_once)
