"""The core refuses calls of a fenced or evicted process, and ends its open calls."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from atoll_wire import outer_pb2 as pb
from safetensors.numpy import load
from safetensors.torch import save as save_torch

from tests.end_to_end.test_refusals import Hand, request, taken_over
from tests.end_to_end.world import Core, core, small_model

STALE = {
    "evicted": (grpc.StatusCode.FAILED_PRECONDITION, "was evicted"),
    "fenced": (grpc.StatusCode.FAILED_PRECONDITION, "started again elsewhere"),
    "said nothing": (grpc.StatusCode.UNAUTHENTICATED, "join"),
    "guessed": (grpc.StatusCode.UNAUTHENTICATED, "join"),
    "of another generation": (grpc.StatusCode.UNAUTHENTICATED, "another run or generation"),
    "left": (grpc.StatusCode.UNAUTHENTICATED, "join"),
    "of before it left": (grpc.StatusCode.UNAUTHENTICATED, "is unknown to this core: join again"),
    "let in again": (grpc.StatusCode.UNAUTHENTICATED, "has not joined this core: join first"),
}


def parameters(seed: int) -> bytes:
    return save_torch(small_model(seed).state_dict())


def evict(running: Core, name: str, reason: str = "it lies") -> None:
    with running.operator() as operator:
        operator.Evict(pb.EvictRequest(learner=name, reason=reason), timeout=20)


def initialise(hand: Hand, data: bytes, between: Callable[[], None] = lambda: None) -> None:
    """Sends initial parameters. between: called in the middle of the upload."""

    def messages() -> Iterator[pb.InitialiseRequest]:
        said = {"size_bytes": len(data), "sha256": hashlib.sha256(data).digest()}
        yield pb.InitialiseRequest(header=pb.InitialiseHeader(session=hand.session, **said))
        yield pb.InitialiseRequest(chunk=data[:1000])
        between()
        yield pb.InitialiseRequest(chunk=data[1000:])

    hand.stub.Initialise(messages(), timeout=20)


def refused(status: grpc.StatusCode, words: str, act: Callable[[], object]) -> None:
    with pytest.raises(grpc.RpcError, match=words) as caught:
        act()
    assert caught.value.code() is status, caught.value.details()


def exported(running: Core) -> bytes:
    with running.operator() as operator:
        export = operator.ExportCheckpoint(pb.ExportCheckpointRequest(), timeout=20)
        return b"".join(each.chunk for each in export)


def same(some: bytes, others: bytes) -> bool:
    ours, theirs = load(some), load(others)
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_initial_parameters_of_an_evicted_or_fenced_process_are_not_accepted(tmp_path):
    with core(tmp_path) as running, running.outer() as stub:
        evicted = Hand(stub, "evicted")
        refused(*STALE["evicted"], lambda: initialise(evicted, parameters(1), lambda: evict(running, "evicted")))
        old, newer = Hand(stub, "x"), []

        def again() -> None:
            newer.append(taken_over(stub, request("x", nonce=5)))
            assert newer[0].state == pb.JoinReply.STATE_INITIALISE, "the lease must stay with the name"

        refused(*STALE["fenced"], lambda: initialise(old, parameters(2), again))
        old.session.MergeFrom(pb.Session(incarnation=newer[0].incarnation, token=newer[0].token))
        empty = pb.InitialiseRequest(chunk=b"")
        header = pb.InitialiseRequest(header=pb.InitialiseHeader(session=old.session, size_bytes=9, sha256=bytes(32)))
        refused(grpc.StatusCode.INVALID_ARGUMENT, "empty", lambda: stub.Initialise(iter([header, empty]), timeout=20))
        initialise(old, parameters(3))  # the newer process
        assert same(exported(running), parameters(3))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    directory = tmp_path_factory.mktemp("core")
    (directory / "first.safetensors").write_bytes(parameters(1))
    with core(directory, "--init", str(directory / "first.safetensors")) as it:
        yield it


def session_field(message) -> str | None:
    """Returns the name of the field with the session: `session`, or a header."""
    if "session" in message.fields_by_name:
        return "session"
    parts = (each for each in message.fields if each.message_type and "session" in each.message_type.fields_by_name)
    return next((each.name for each in parts), None)


METHODS = {
    method.name: (method, session_field(method.input_type))
    for method in pb.DESCRIPTOR.services_by_name["Outer"].methods
    if method.name != "Join"
}


def call(stub, name: str, session: pb.Session) -> None:
    method, field = METHODS[name]
    made = getattr(pb, method.input_type.name)()
    where = getattr(made, field)
    (where if field == "session" else where.session).CopyFrom(session)
    reply = getattr(stub, name)(iter([made]) if method.client_streaming else made, timeout=20)
    list(reply) if method.server_streaming else None


@pytest.mark.parametrize("kind", STALE)
def test_every_call_checks_its_session(running, kind):
    with running.outer() as stub:
        hand = Hand(stub, kind.replace(" ", "-"))
        match kind:
            case "evicted":
                evict(running, hand.session.learner)
            case "fenced":
                taken_over(stub, request(hand.session.learner, nonce=5))
            case "said nothing":
                hand.session.ClearField("token")
            case "guessed":
                hand.session.token = bytes(16)
            case "of another generation":
                hand.session.generation += 1
            case "left":
                stub.Leave(pb.LeaveRequest(session=hand.session), timeout=20)
            case "of before it left":
                stub.Leave(pb.LeaveRequest(session=hand.session), timeout=20)
                again = Hand(stub, hand.session.learner).session
                assert again.incarnation == hand.session.incarnation, "the same process must keep its incarnation"
            case "let in again":
                evict(running, hand.session.learner)
                evict(running, hand.session.learner, reason="")
        assert all(field for _, field in METHODS.values()), "a new call without a session needs a case here"
        for name in METHODS:
            refused(*STALE[kind], lambda name=name: call(stub, name, hand.session))
        with pytest.raises(grpc.RpcError):
            call(stub, "Fetch", pb.Session())


def test_open_calls_of_an_evicted_learner_end(running):
    with running.outer() as stub:
        hand, said = Hand(stub, "open"), queue.SimpleQueue()
        following = stub.Follow(pb.FollowRequest(session=hand.session), timeout=20)
        assert next(following).HasField("current")
        reporting = stub.Report.future(iter(said.get, None), timeout=20)
        said.put(pb.Progress(session=hand.session, steps=1, tokens=1))
        evict(running, "open")
        refused(*STALE["evicted"], lambda: list(following))
        said.put(pb.Progress(steps=2, tokens=2))
        refused(*STALE["evicted"], reporting.result)
        said.put(None)

        def in_the_middle(messages):
            yield from messages[:1]
            evict(running, "middle")
            yield from messages[1:]

        refused(*STALE["evicted"], lambda: Hand(stub, "middle").push(sends=in_the_middle))
