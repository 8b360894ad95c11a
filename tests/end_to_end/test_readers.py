"""The calls that a process with a reader's certificate may make to a core and a front."""

from __future__ import annotations

import contextlib
import json

import atoll
import grpc
import pytest
from atoll.demo.processes import free_port
from atoll.follower.follow_session import Source
from atoll_server.access.certificate_authority import issue
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.contract import PROTOCOL
from atoll_wire.messages.frame_messages import fetch_reply
from atoll_wire.security.certificate import Role
from atoll_wire.security.transport import TransportSecurity

from benchmarks.process_state import metrics
from tests.end_to_end.following import recorder
from tests.end_to_end.test_refusals import request
from tests.end_to_end.test_strangers import Papers
from tests.end_to_end.world import core, eventually, front, small_model, train

DENIED, EXHAUSTED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED
UNKNOWN = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Yields certificates, and the addresses of a core and a front whose run has parameters."""
    directory = tmp_path_factory.mktemp("readers")
    papers = Papers(directory / "certs")
    reader = issue(papers.place, Role.READER, "eval", (), 1)
    options = ["--tls", str(papers.core)]
    with core(directory, *options) as it:
        it.security = TransportSecurity(papers.operator)
        with front(directory / "eu", it.address, "--tls", str(papers.front)) as eu:
            train(it.address, "a", steps=20, tls=papers.learner("a"))
            yield papers, reader, it, eu


@contextlib.contextmanager
def stubs(address: str, papers):
    with TransportSecurity(papers).dial_and_wait(address) as channel:
        yield rpc.ReaderStub(channel), rpc.OuterStub(channel), rpc.OperatorStub(channel)


def code_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code()


@pytest.mark.parametrize("where", ["core", "front"])
def test_a_readers_certificate_counts_for_readers_calls_only(place, where):
    _, reader, it, eu = place
    address = it.address if where == "core" else eu.address
    with stubs(address, reader) as (reading, outer, operator):
        described = reading.Describe(pb.DescribeRequest(protocol=PROTOCOL), timeout=20)
        watch = reading.Watch(pb.WatchRequest(run=described.run, generation=described.generation))
        versions = next(reply for reply in watch if reply.log).versions
        assert len(versions) == 2
        watch.cancel()
        session = pb.Session(run=described.run, learner="a", generation=described.generation)
        for call in (
            lambda: outer.Join(request("a"), timeout=20),
            lambda: next(outer.Fetch(pb.FetchRequest(session=session, whole=True), timeout=20)),
            lambda: next(outer.Follow(pb.FollowRequest(session=session), timeout=20)),
            lambda: next(outer.Push(iter([pb.PushRequest(header=pb.PushHeader(session=session))]), timeout=20)),
            lambda: outer.Report(iter([pb.Progress(session=session)]), timeout=20),
            lambda: outer.Leave(pb.LeaveRequest(session=session), timeout=20),
            lambda: operator.Status(pb.StatusRequest(), timeout=20),
            lambda: next(operator.ExportCheckpoint(pb.ExportCheckpointRequest(), timeout=20)),
        ):
            assert code_of(call) is DENIED


@pytest.mark.parametrize("where", ["core", "front"])
def test_a_learners_certificate_does_not_count_for_readers_calls(place, where):
    papers, _, it, eu = place
    address = it.address if where == "core" else eu.address
    learner = papers.learner("a")
    run = it.status().run
    with stubs(address, learner) as (reading, _, _):
        for call in (
            lambda: reading.Describe(pb.DescribeRequest(protocol=PROTOCOL), timeout=20),
            lambda: next(reading.Watch(pb.WatchRequest(run=run, generation=1), timeout=20)),
            lambda: next(reading.Read(pb.ReadRequest(run=run, generation=1, whole=True), timeout=20)),
        ):
            assert code_of(call) is DENIED
    with pytest.raises(atoll.FollowerError, match="but the certificate of reader/NAME is needed"):
        Source([address], 1.0, TransportSecurity(learner)).check()
    if where == "core":
        lines = [json.loads(line) for line in (it.directory / "audit.jsonl").read_text().splitlines()]
        assert any(line["act"] == "refused" and "this call is for readers" in line["detail"] for line in lines)


def test_a_follower_reads_through_a_front_with_tls_and_an_operator_may_read_too(place):
    papers, reader, it, eu = place
    with recorder(eu.address, tls=reader) as follower:
        eventually(lambda: bool(follower.cuts) and follower.compare_newest(it))
    with stubs(it.address, papers.operator) as (reading, _, _):
        assert reading.Describe(pb.DescribeRequest(protocol=PROTOCOL), timeout=20).run == it.status().run


@pytest.mark.parametrize("where", ["core", "front"])
def test_a_reader_gets_no_receipts_and_must_name_the_generation(place, where):
    _, reader, it, eu = place
    address = it.address if where == "core" else eu.address
    fetch = "/atoll.v1.Reader/Read"
    with TransportSecurity(reader).dial_and_wait(address) as channel:
        reading = rpc.ReaderStub(channel)
        described = reading.Describe(pb.DescribeRequest(protocol=PROTOCOL), timeout=20)
        watch = reading.Watch(pb.WatchRequest(run=described.run, generation=described.generation))
        newest = next(reply for reply in watch if reply.log).versions[0]
        read = channel.unary_stream(fetch, pb.ReadRequest.SerializeToString, fetch_reply)
        asked = pb.ReadRequest(
            run=described.run, generation=described.generation, fragment=newest.fragment, version=newest.version
        )
        header = next(iter(read(asked, timeout=20))).header
        assert (header.version, header.crc32c) == (newest.version, newest.crc32c)
        assert not header.receipts
        asked.generation += 1
        assert code_of(lambda: next(iter(read(asked, timeout=20)))) is UNKNOWN
        assert code_of(lambda: next(reading.Watch(pb.WatchRequest(run="other", generation=1), timeout=20))) is UNKNOWN
        watch.cancel()


def watching(reading: rpc.ReaderStub):
    """Returns a new reader's watch."""
    described = reading.Describe(pb.DescribeRequest(protocol=PROTOCOL), timeout=20)
    return reading.Watch(pb.WatchRequest(run=described.run, generation=described.generation), timeout=60)


def test_more_readers_than_allowed_are_refused_and_counted(tmp_path):
    port = free_port()
    options = ["--limit-readers", "1", "--metrics-listen", f"127.0.0.1:{port}"]
    with core(tmp_path / "home", *options) as it, front(tmp_path / "eu", it.address, "--limit-readers", "1") as eu:
        train(it.address, "a", steps=8)
        with (
            TransportSecurity().dial_and_wait(eu.address) as far,
            TransportSecurity().dial_and_wait(it.address) as near,
        ):
            first = watching(rpc.ReaderStub(far))
            assert next(reply for reply in first if reply.log).versions, "a core without TLS also counts the front"
            assert code_of(lambda: list(watching(rpc.ReaderStub(near)))) is EXHAUSTED
            assert code_of(lambda: list(watching(rpc.ReaderStub(far)))) is EXHAUSTED
            assert next(first), "the first reader must continue"
            first.cancel()
        assert metrics(port).total("atoll_limited_total", limit="readers") == 1
        assert eu.metrics().total("atoll_front_limited_total", limit="readers") == 1


def test_a_core_with_operator_tokens_and_without_tls_wants_one_from_readers(tmp_path):
    from atoll_server.access import tokens

    token = tokens.new(tmp_path / "tokens", "alice")
    with core(tmp_path, "--operator-tokens", str(tmp_path / "tokens")) as it:
        train(it.address, "a", steps=8)
        with (
            pytest.raises(atoll.FollowerError, match="this call is for readers"),
            atoll.Follower(small_model(), it.address),
        ):
            pass
        with atoll.Follower(small_model(), it.address, token=token) as follower:
            assert follower.versions
