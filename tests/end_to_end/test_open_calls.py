"""Streams end when their session is over, their connection is cut, or their process stops."""

from __future__ import annotations

import queue
import time
from functools import partial

import grpc
import pytest
from atoll.demo.processes import free_port
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.connections.calls import open_calls as opened_here

from benchmarks.process_state import metrics
from tests.end_to_end.relay import relay
from tests.end_to_end.test_refusals import Hand
from tests.end_to_end.world import Trainee, core, eventually, front, open_calls

ONE = {"Follow": 1.0, "Report": 1.0}


@pytest.mark.ci
def test_after_many_cuts_a_front_has_one_follow_and_one_report_per_learner(tmp_path):
    port, stop = free_port(), list[bool]()
    with (
        core(tmp_path, "--metrics-listen", f"127.0.0.1:{port}") as running,
        relay(running.address) as link,
        front(tmp_path / "front", link.address) as gateway,
    ):
        trainee = Trainee(gateway.address, "a", lambda _: bool(stop))
        trainee.start()

        def came_back(times: int) -> bool:
            return (
                hasattr(trainee, "learner")
                and (stats := trainee.learner.stats()).connected
                and stats.reconnects == times
            )

        for cuts in range(4):
            eventually(partial(came_back, cuts))
            eventually(lambda: open_calls(metrics(port), "answered") == ONE)  # only then does a cut hit a session
            link.reset()
        eventually(partial(came_back, 4))
        eventually(lambda: {name: opened_here()[name] for name in ONE} == ONE)
        eventually(lambda: open_calls(gateway.metrics(), "answered") == ONE)
        eventually(lambda: open_calls(gateway.metrics(), "opened") == ONE)
        eventually(lambda: open_calls(metrics(port), "answered") == ONE)
        stop.append(True)
        trainee.done()
        eventually(lambda: not sum(open_calls(metrics(port), "answered").values()))


def test_calls_of_a_session_end_when_its_learner_rejoins_or_is_evicted(tmp_path):
    with core(tmp_path) as running, running.outer() as stub:
        trainee = Trainee(running.address, "first", lambda _: True)
        trainee.start()
        trainee.done()
        hand = Hand(stub, "a")
        said = queue.SimpleQueue[pb.Progress | None]()
        follow, report = stub.Follow(pb.FollowRequest(session=hand.session)), stub.Report.future(iter(said.get, None))
        said.put(pb.Progress(session=hand.session))
        next(follow)
        hand = Hand(stub, "a")
        for call in (follow, report):
            eventually(call.done)
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        follow = stub.Follow(pb.FollowRequest(session=hand.session))
        next(follow)
        with running.operator() as operator:
            operator.Evict(pb.EvictRequest(learner="a", reason="a test"), timeout=20)
        eventually(follow.done)
        assert follow.code() is grpc.StatusCode.FAILED_PRECONDITION
        said.put(None)


@pytest.mark.ci
@pytest.mark.parametrize("behind", ["a core", "a front"])
def test_a_process_with_four_learners_stops_at_once(tmp_path, behind):
    """An open Report once delayed the stop by the grace period: ten seconds at a core, two at a front."""
    stop = list[bool]()
    with core(tmp_path) as running, front(tmp_path / "front", running.address) as gateway:
        serving = running if behind == "a core" else gateway
        trainees = [Trainee(serving.address, name, lambda _: bool(stop), drain_s=0.0) for name in "abcd"]
        for trainee in trainees:
            trainee.start()
        eventually(lambda: all(hasattr(t, "learner") and t.learner.stats().merged > 1 for t in trainees))
        with running.security.dial_and_wait(serving.address) as channel:
            mute = rpc.OuterStub(channel)
            silent = Hand(mute, "silent")
            said = queue.SimpleQueue[pb.Progress | None]()
            report = mute.Report.future(iter(said.get, None))
            said.put(pb.Progress(session=silent.session, steps=1))
            eventually(lambda: ("silent", 1) in {(each.learner, each.steps) for each in running.status().learners})
            began = time.monotonic()
            serving.stop()
            took_s = time.monotonic() - began
            said.put(None)
            assert report.exception().code() is grpc.StatusCode.UNAVAILABLE
        stop.append(True)
        for trainee in trainees:
            trainee.done()
        assert took_s < 5.0, "the stop takes 0.6 s on an idle machine"
