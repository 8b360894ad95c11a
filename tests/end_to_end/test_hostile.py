"""Hostile callers at a core and at a front: they are refused or limited, and other learners keep training."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from pathlib import Path

import grpc
import pytest
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.messages.frame_messages import FRAMES_PER_MESSAGE
from atoll_wire.messages.message_parts import MESSAGE_BYTES

from tests.end_to_end.raw import Raw, begun, whole
from tests.end_to_end.test_refusals import Hand, request
from tests.end_to_end.world import Trainee, core, eventually, front, train

INVALID, LOSS = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS
UNKNOWN, EXISTS = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.ALREADY_EXISTS


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with core(tmp_path_factory.mktemp("home"), "--inner-steps", "100") as it:
        train(it.address, "a", steps=20)
        yield it


@pytest.fixture(scope="module")
def eu(tmp_path_factory, home):
    with front(tmp_path_factory.mktemp("eu"), home.address) as it:
        yield it


@pytest.fixture(params=["core", "front"])
def where(request, home, eu):
    return {"core": home, "front": eu}[request.param]


BOTH = ["core", "front"]


@contextlib.contextmanager
def hand(address: str, name: str):
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", 64 << 20)]) as channel:
        yield Hand(rpc.OuterStub(channel), name)


def refused(code: grpc.StatusCode, call) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() is code, caught.value
    return caught.value.details()


def _spoil(_, frames):
    frames[0].payload = bytes(len(frames[0].payload))


def _elsewhere(_, frames):
    frames[0].index = 77


def test_a_frame_that_is_not_what_it_says_ends_at_the_front(home, eu):
    with hand(eu.address, "spoilt") as it:
        before = eu.wan_bytes("up", "contribution")
        refused(LOSS, lambda: it.push(_spoil))
        refused(INVALID, lambda: it.push(_elsewhere))
        refused(
            INVALID,
            lambda: it.push(sends=lambda m: [m[0], pb.PushRequest(frames=[*m[1].frames] * (FRAMES_PER_MESSAGE + 1))]),
        )
        refused(INVALID, lambda: it.push(sends=lambda m: [pb.PushRequest(header=m[0].header, frames=m[1].frames)]))
        refused(INVALID, lambda: it.push(sends=lambda m: m[1:]))
        after = eu.wan_bytes("up", "contribution")
        assert before == after, "no invalid frame may cross the WAN"
        assert it.push(seq=2).fate == pb.FATE_PENDING, "a valid one must"


def test_a_contribution_counts_once_however_often_it_is_sent(where, home):
    with hand(where.address, f"again-{where.address.rpartition(':')[2]}") as it:
        first = it.push()
        accepted = home.status().contributions.accepted
        assert it.push(sends=lambda messages: messages[:1]).seq == first.seq
        assert home.status().contributions.accepted == accepted
        other = lambda header, _: setattr(header, "digest", b"x" * 32)  # noqa: E731
        refused(EXISTS, lambda: it.push(other, sends=lambda messages: messages[:1]))


def test_no_learner_can_claim_anothers_contribution(where, home):
    port = where.address.rpartition(":")[2]
    with hand(where.address, f"owner-{port}") as owner, hand(where.address, f"thief-{port}") as thief:
        accepted = home.status().contributions.accepted
        guessed = pb.Session()
        guessed.CopyFrom(owner.session)
        guessed.token = thief.session.token
        alone = lambda messages: messages[:1]  # noqa: E731 - the header: a frame after it may be too late to be refused so
        refused(UNKNOWN, lambda: owner.push(lambda header, _: header.session.CopyFrom(guessed), sends=alone))
        mixed = pb.Session()
        mixed.CopyFrom(thief.session)
        mixed.learner = owner.session.learner
        refused(UNKNOWN, lambda: thief.push(lambda header, _: header.session.CopyFrom(mixed), sends=alone))
        assert home.status().contributions.accepted == accepted
        assert owner.push().fate == pb.FATE_PENDING


def test_a_fronts_cached_items_need_a_valid_session(home, eu):
    with hand(eu.address, "reader") as it:
        wanted = pb.FetchRequest(session=it.session, fragment=0, whole=True)
        assert len(list(it.stub.Fetch(wanted, timeout=20))) > 1
        eventually(lambda: eu.metrics().total("atoll_front_cached_bytes") > 0)  # counted after the last frame is sent
        for change in ({"token": b"guessed"}, {"learner": "absent"}, {"generation": 7}, {"run": "another"}):
            other = pb.FetchRequest()
            other.CopyFrom(wanted)
            for name, value in change.items():
                setattr(other.session, name, value)
            for whole in (True, False):
                other.whole = whole
                refused(UNKNOWN, lambda other=other: list(it.stub.Fetch(other, timeout=20)))
        refused(INVALID, lambda: list(it.stub.Fetch(pb.FetchRequest(session=it.session, fragment=99), timeout=20)))
        for frames in ([2**32 - 1], [0, 0], [1, 0]):
            strange = pb.FetchRequest(session=it.session, fragment=0, whole=True, frames=frames)
            refused(INVALID, lambda strange=strange: list(it.stub.Fetch(strange, timeout=20)))


def test_messages_that_are_too_large_are_not_taken(where):
    with hand(where.address, "large") as it:
        large = pb.Frame(index=0, payload=bytes(17 << 20))
        refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED, lambda: it.push(sends=lambda m: [m[0], pb.PushRequest(frames=[large])])
        )
        refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            lambda: it.stub.Join(request("large", frozen_digest=bytes(17 << 20)), timeout=20),
        )


def test_bytes_of_another_protocol_are_hung_up_on(where):
    host, _, port = where.address.rpartition(":")
    for said in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(64), b"\x16\x03\x01\x02\x00\x01" + bytes(300)):
        with socket.create_connection((host, int(port)), timeout=20) as it:
            it.sendall(said)
            with contextlib.suppress(ConnectionError):
                while it.recv(1 << 16):
                    pass


HALVES = 96 << 20


@pytest.fixture
def raws(where):
    """Yields connections that use no client library."""
    them = [Raw(where.address) for _ in range(12)]
    yield them
    for each in them:
        each.close()


def test_a_message_that_is_too_large_ends_at_its_header(where, raws):
    for method in ("Outer/Join", "Outer/Push", "Outer/Fetch", "Operator/Status"):
        before, began = resident(where.child), begun(128 << 20, 112 << 20)  # as test memory allows
        calls = [(each, each.call(f"/atoll.v1.{method}", began)) for each in raws]
        deadline = time.monotonic() + 20
        while any(call not in each.ended and not each.closed for each, call in calls) and time.monotonic() < deadline:
            for each in raws:
                each.pump(0.01)
        assert all(call in each.ended or each.closed for each, call in calls), f"{method} still accepts the message"
        assert resident(where.child) - before < HALVES // 4


@pytest.mark.ci
@pytest.mark.parametrize("where", BOTH, indirect=True)
def test_half_sent_messages_hold_96_mib_at_most(where, raws):
    """Many connections send as many incomplete messages as possible, each as large as allowed.

    Some calls begin with a complete message.
    """
    header, before = pb.PushHeader(), resident(where.child)

    def spoil(sound, _):
        header.CopyFrom(sound)
        sound.frames = 99

    with hand(where.address, f"halves-{where.address.rpartition(':')[2]}") as it:
        refused(INVALID, lambda: it.push(spoil, sends=lambda messages: messages[:1]))
        half = begun(MESSAGE_BYTES)
        push = whole(pb.PushRequest(header=header).SerializeToString()) + half
        report = whole(pb.Progress(session=it.session, steps=1, tokens=1).SerializeToString()) + half
        kinds = [("Push", push)] * 6 + [("Report", report), ("Join", half), ("Fetch", half), ("Initialise", half)]
        for _ in range(4):  # 40 calls over each connection, which allows 64
            for name, message in kinds:
                for each in raws:
                    each.call(f"/atoll.v1.Outer/{name}", message)
            for each in raws:
                each.pump(0.1)
        most, until = 0, time.monotonic() + 8
        while time.monotonic() < until:
            for each in raws:
                each.pump(0.02)
            most = max(most, resident(where.child) - before)
        assert sum(each.sent_bytes for each in raws) > HALVES // 4, "too few bytes were sent"
        assert most < HALVES
        assert it.push(seq=2).fate == pb.FATE_PENDING, "the core must still answer the learner"


def resident(child) -> int:
    lines = Path(f"/proc/{child.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) << 10


COUNT = 10_000


@pytest.mark.ci
@pytest.mark.parametrize("where", BOTH, indirect=True)
def test_ten_thousand_idle_connections_delay_no_learner(where):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    trainee = Trainee(where.address, "steadfast", lambda _: enough.is_set())
    enough, silent = threading.Event(), list[socket.socket]()
    try:
        trainee.start()
        eventually(lambda: len(trainee.losses) > 10, 40)
        before, host, port = resident(where.child), *where.address.rsplit(":", 1)
        for _ in range(COUNT):
            silent.append(socket.create_connection((host, int(port)), timeout=20))
        steps, merged = len(trainee.losses), trainee.learner.stats().merged
        with hand(where.address, f"late-{port}") as it:
            assert it.session.token, "another learner must be able to join"
        eventually(lambda: len(trainee.losses) > steps + 20 and trainee.learner.stats().merged > merged, 40)
        assert trainee.learner.stats().connected
        assert resident(where.child) - before < 400 << 20
        silent[0].settimeout(40)
        with contextlib.suppress(ConnectionError):
            while silent[0].recv(1 << 16):
                pass
    finally:
        for each in silent:
            each.close()
        enough.set()
        trainee.done()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.ci
def test_an_upload_that_stops_is_given_up(where):
    """The core ends an upload without frames after a minute."""
    with hand(where.address, f"slow-{where.address.rpartition(':')[2]}") as it:
        quiet = threading.Event()

        def header_only(messages):
            yield messages[0]
            quiet.wait(100)

        began = time.monotonic()
        refused(grpc.StatusCode.UNAVAILABLE, lambda: it.push(sends=header_only, timeout_s=95))
        quiet.set()
        assert time.monotonic() - began < 90


def test_reflection_is_there_on_loopback_only(tmp_path):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    asked = reflection_pb2.ServerReflectionRequest(list_services="*")
    for name, more in (("near", []), ("far", ["--listen", "0.0.0.0:0", "--insecure-plaintext"])):
        with core(tmp_path / name, *more) as it, grpc.insecure_channel(it.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            ask = lambda stub=stub: list(stub.ServerReflectionInfo(iter([asked]), timeout=20))  # noqa: E731
            if more:
                refused(grpc.StatusCode.UNIMPLEMENTED, ask)
            else:
                assert ask()
