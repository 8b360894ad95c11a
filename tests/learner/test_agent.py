"""The agent with a core that fails in every way that the protocol allows: no work is lost, repeated or delayed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
import structlog
import torch
from atoll import LearnerError
from atoll.agent import run_session
from atoll.agent.run_session import DUPLICATE_S
from atoll.boundary.host_values import HostValues
from atoll.boundary.local_parameters import LocalParameters
from atoll.fragments import in_place
from atoll.fragments.exchange import PER_BOUNDARY
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.layout.layout import FRAME_PARAMETERS
from numba.core import event
from structlog.testing import capture_logs
from torch import nn

from tests.clocks import SetClock
from tests.learner.fake_core import fake_core
from tests.learner.loops import Loop, until


@pytest.fixture
def core():
    with fake_core() as it:
        yield it


class Wide(nn.Module):
    """A model with one fragment of three frames."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(FRAME_PARAMETERS // 400, 1000, bias=False)


def flown(loop: Loop, core, fragment: int = 0) -> tuple:
    """Sends a contribution, and waits until the learner knows the acknowledgement. Returns its key."""
    core.open(fragment)
    loop.until(lambda: core.pending(fragment))
    return core.pending(fragment)[-1]


def test_a_learner_logs_once_that_it_compiles_kernels(core, monkeypatch):
    def compile_two() -> None:
        for function in (frame_codec.decompress, frame_codec.warm_up):
            with event.trigger_event("numba:compile", {"dispatcher": SimpleNamespace(py_func=function)}):
                pass

    monkeypatch.setattr("atoll.agent.thread.segments.warm_up", compile_two)
    with capture_logs() as lines, Loop(core.address).learner:
        pass
    assert [line["event"].partition(":")[0] for line in lines].count("compiling kernels") == 1


def test_work_is_sent_merged_and_adopted(core):
    loop = Loop(core.address)
    start = [p.detach().double().numpy().copy() for p in loop.model.parameters()]
    with loop.learner as learner:
        for fragment in (0, 1):
            flown(loop, core, fragment)
            core.merge(fragment)
            loop.until(lambda fragment=fragment: learner.stats().versions[fragment] == 1)
        # With one learner, the mean is its own work. The parameters are those of training alone, up to the published
        # update's coding error.
        for parameter, begun, moved in zip(loop.model.parameters(), start, loop.moved, strict=True):
            np.testing.assert_allclose(parameter.detach().double().numpy(), begun - moved, atol=0.02)
        assert learner.stats().merged == 2
    assert core.left == ["a"]


def test_a_cut_upload_continues_with_the_missing_frames_under_the_same_key():
    with fake_core(fragments=1) as core:
        loop = Loop(core.address, model=Wide())
        with loop.learner:
            core.cut_after = 2
            key = flown(loop, core)
            assert sorted(index for k, index in core.frames if k == key) == [0, 1, 2]
            assert core.headers[key].tokens % 10 == 0
            core.merge(0)
            loop.until(lambda: loop.learner.stats().merged == 1)


def test_a_lost_acknowledgement_is_requested_and_no_frame_is_sent_twice(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        core.lose_acknowledgement = True
        key = flown(loop, core)
        until(lambda: learner.stats().last_error.startswith("unavailable"))
        core.merge(0)
        loop.until(lambda: learner.stats().versions[0] == 1)
        assert [k for k, _ in core.frames] == [key]
        assert (learner.stats().merged, learner.stats().pending) == (1, 0)


def test_a_missing_update_leads_to_a_whole_fetch_and_the_fate_is_known(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        flown(loop, core)
        core.merge(0, tell=False)
        core.updates.clear()
        core.merge(0)
        loop.until(lambda: learner.stats().versions[0] == 2)
        assert learner.stats().merged == 1
        assert core.fetches[-1].whole


def test_a_wrong_checksum_is_counted_and_leads_to_a_whole_fetch(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        core.spoil_updates = True
        core.merge(0)
        loop.until(lambda: learner.stats().versions[0] == 1)
        assert learner.stats().mismatches == 1
        assert core.fetches[-1].whole


def test_refused_work_stays_outstanding_and_is_sent_again(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        first = flown(loop, core)
        core.refuse(0, drop=False)
        loop.until(lambda: learner.stats().refused == 1)
        second = flown(loop, core)
        assert second[3] == first[3] + 1
        assert core.headers[second].tokens > core.headers[first].tokens
        assert learner.stats().abandoned_tokens == 0


@pytest.mark.parametrize("at_the_door", [False, True])
def test_work_that_is_too_stale_is_dropped_with_a_whole_fetch(core, at_the_door):
    loop = Loop(core.address)
    with loop.learner as learner:
        if at_the_door:
            core.fail("Push", grpc.StatusCode.OUT_OF_RANGE)
            core.open(0)
        else:
            flown(loop, core)
            core.refuse(0, drop=True)
        loop.until(lambda: learner.stats().abandoned_tokens > 0)
        assert core.fetches[-1].whole
        # A new contribution of this fragment contains only later work.
        key = flown(loop, core)
        assert core.headers[key].tokens < 10 * learner.stats().steps


def test_a_refusal_that_comes_with_the_whole_fragment_drops_the_work_and_frees_the_fragment(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        flown(loop, core)
        core.refuse(0, drop=True, tell=False)
        core.merge(0, tell=False)
        core.updates.clear()
        core.merge(0)  # the update is gone, but the whole fragment comes with this learner's fates
        loop.until(lambda: learner.stats().refused == 1)
        loop.until(lambda: learner.stats().versions[0] == 2)
        assert learner.stats().abandoned_tokens > 0
        flown(loop, core)


def test_a_learner_continues_with_a_core_restored_from_a_backup(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        old = (core.theta[0], core.versions[0])
        for _ in range(3):
            flown(loop, core)
            core.merge(0)
            version = core.versions[0]
            loop.until(lambda version=version: learner.stats().versions[0] == version)
        core.stop()
        core.theta[0], core.versions[0] = old
        core.receipts.clear()
        fetched = len(core.fetches)
        core.start()
        loop.until(lambda: learner.stats().versions[0] == 0)
        assert learner.stats().abandoned_tokens == 0, "a learner's own work must stay"
        flown(loop, core)
        assert core.headers[core.pending(0)[-1]].base_version == 0
        assert len(core.fetches) == fetched + 1, "one fetch must suffice"


def test_after_a_restart_of_the_core_the_same_incarnation_continues(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        flown(loop, core)
        joined = len(core.joins)  # the core requested initial parameters, so the learner joined more than once
        core.stop()
        core.start()
        loop.until(lambda: len(core.joins) > joined and learner.stats().connected)
        assert (core.joins[-1].nonce, core.joins[-1].incarnation) == (core.joins[0].nonce, 1)
        core.merge(0)
        loop.until(lambda: learner.stats().merged == 1)


def test_a_long_outage_is_logged_again_and_counts_once(core, monkeypatch):
    monkeypatch.setattr(run_session, "REMIND_S", 0.5)
    loop = Loop(core.address)
    with capture_logs() as logs, loop.learner as learner:
        core.stop()
        loop.until(lambda: sum(each["event"].startswith("lost the connection to the core") for each in logs) > 1)
        core.start()
        loop.until(lambda: learner.stats().connected)
        assert learner.stats().reconnects == 1


def test_a_cut_follow_continues_from_its_position(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        core.merge(0)
        loop.until(lambda: learner.stats().versions[0] == 1)
        core.forget_sessions()
        core.fail("Push", grpc.StatusCode.UNAUTHENTICATED)
        core.open(0)
        loop.until(lambda: len(core.follows) > 1)
        assert (core.follows[-1].log, core.follows[-1].sequence >= 1) == (1, True)
        loop.until(lambda: core.pending(0))


def test_a_core_restart_during_the_first_fetch_does_not_block_a_learner(core):
    Loop(core.address, "first").learner.__enter__().__exit__(None, None, None)
    core.fail("Fetch", grpc.StatusCode.UNAUTHENTICATED, "unknown session: join again", times=2)
    loop = Loop(core.address, connect_timeout_s=5.0)
    entered = threading.Thread(target=loop.learner.__enter__, daemon=True)
    entered.start()
    entered.join(15.0)
    assert not entered.is_alive()
    assert loop.learner.stats().connected
    loop.learner.__exit__(None, None, None)


def test_the_loss_of_the_core_during_the_first_fetch_gives_one_line(core):
    Loop(core.address, "first").learner.__enter__().__exit__(None, None, None)
    core.fail("Fetch", grpc.StatusCode.UNAVAILABLE, times=10_000)
    loop = Loop(core.address, connect_timeout_s=2.0)
    errors = []

    def enter() -> None:
        try:
            loop.learner.__enter__()
        except LearnerError as error:
            errors.append(error)

    entered = threading.Thread(target=enter, daemon=True)
    before = core.asked["Fetch"]
    entered.start()
    until(lambda: core.asked["Fetch"] > before)
    core.stop()
    entered.join(20.0)
    core.start()
    assert not entered.is_alive()
    assert "could not join the run at" in str(errors[0])


def test_a_learner_waits_for_a_name_that_is_still_taken_at_a_late_core(core, monkeypatch):
    """The learner keeps trying for DUPLICATE_S after the core's first refusal, not after its own first attempt."""
    clock = SetClock(time.monotonic(), time.time())
    core.stop()
    loop = Loop(core.address, connect_timeout_s=100.0)
    monkeypatch.setattr(loop.learner, "_clock", clock)
    entered = threading.Thread(target=loop.learner.__enter__, daemon=True)
    entered.start()
    until(lambda: loop.learner.stats().last_error)  # there was no core at the first attempt
    clock.steady += DUPLICATE_S + 1.0
    core.fail("Join", grpc.StatusCode.ALREADY_EXISTS, "a learner has this name now", times=2)
    core.start()
    entered.join(15.0)
    assert not entered.is_alive()
    assert loop.learner.stats().connected, loop.learner.stats().last_error
    loop.learner.__exit__(None, None, None)


def test_repeatedly_failing_fetches_are_logged(core):
    core.fail("Fetch", grpc.StatusCode.UNKNOWN, "something in it broke", times=10)
    with structlog.testing.capture_logs() as told, Loop(core.address).learner:
        pass
    assert any("something in it broke" in line.get("error", "") for line in told)


def test_a_lost_refusal_is_requested_until_it_is_known(core):
    """Otherwise, the fragment would stay in flight forever, and the learner would never send its work again."""
    loop = Loop(core.address)
    with loop.learner as learner:
        flown(loop, core)
        core.refuse(0, drop=False, tell=False)
        core.stop()
        core.fail("Push", grpc.StatusCode.UNAVAILABLE, times=2)
        core.start()
        loop.until(lambda: len(core.joins) > 1 and learner.stats().connected)
        loop.until(lambda: learner.stats().refused == 1)
        flown(loop, core)


def test_a_learner_does_not_flood_a_core_that_ends_every_follow(core):
    loop = Loop(core.address)
    with loop.learner:
        core.stop()
        core.start()
        core.end_follow = True
        before = len(core.joins)
        threading.Event().wait(4.0)
        assert len(core.joins) - before < 8


def test_diverged_training_ends_its_own_learner_and_sends_nothing(core):
    loop = Loop(core.address)
    with pytest.raises(LearnerError, match="training has diverged"), loop.learner:  # noqa: PT012
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter[0, 0] = float("nan")
        core.open(0)
        loop.until(lambda: False)
    assert not core.receipts


def test_a_round_without_work_to_send_is_declined_with_the_reason(core):
    loop = Loop(core.address)
    with loop.learner:
        flown(loop, core)
        core.open(0)
        loop.until(lambda: any("in flight" in reason for reason in core.reasons()))
        core.open(1)
        until(lambda: any("no inner step" in reason for reason in core.reasons()))


def test_rounds_are_not_declined_while_a_boundary_with_much_work_is_busy(monkeypatch):
    """A boundary takes at most eight pseudo-gradients. With large fragments, this may take seconds."""
    many, busy = 2 * PER_BOUNDARY, threading.Event()
    take = LocalParameters.take

    def slow(*arguments: object) -> object:
        busy.wait(0.2)
        return take(*arguments)

    monkeypatch.setattr(LocalParameters, "take", slow)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(many)))
    with fake_core(many) as core:
        loop = Loop(core.address, model=model)
        with loop.learner:
            loop.turn()
            for fragment in range(many):
                core.open(fragment)
            loop.until(lambda: len(core.receipts) + len(core.reasons()) == many)
        assert not core.reasons()


def test_at_most_eight_copies_of_values_wait_for_the_coder(monkeypatch):
    """Each pseudo-gradient holds a copy of its values until it is encoded, and a copy takes as much as the fragment."""
    many, may_code = 3 * PER_BOUNDARY, threading.Event()
    code = in_place.code

    def slow(*arguments: object) -> object:
        assert may_code.wait(60)
        return code(*arguments)

    monkeypatch.setattr(HostValues, "located", lambda *_: None)  # as with several ranks
    monkeypatch.setattr(in_place, "code", slow)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(many)))
    with fake_core(many) as core:
        loop = Loop(core.address, model=model)
        with loop.learner as learner:
            loop.turn()
            for fragment in range(many):
                core.open(fragment)
            boundary = learner._boundary

            def copies() -> int:
                return sum(track.flying is not None for track in boundary.local.tracks)

            loop.until(lambda: copies() + len(boundary._exchange._due) == many)  # the learner knows all rounds
            for _ in range(3):
                loop.turn()
                assert copies() == PER_BOUNDARY
            may_code.set()
            loop.until(lambda: len(core.receipts) == many)
        assert not core.reasons()


def test_run_tokens_never_fall(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        core.run_tokens = 10_000
        core.merge(0)
        loop.until(lambda: learner.run_tokens >= 10_000)
        seen = []
        for _ in range(30):
            loop.turn(tokens=100)
            seen.append(learner.run_tokens)
        core.run_tokens = 10_500  # the core knows only a part of the tokens
        core.merge(0)
        loop.until(lambda: seen.append(learner.run_tokens) or learner.stats().versions[0] == 2)
        assert seen == sorted(seen)


def test_total_tokens_follow_the_core(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        assert learner.total_tokens == 0, "this core has no token total"
        core.stop()
        core.total_tokens = 12_345
        core.start()
        loop.until(lambda: learner.total_tokens == 12_345)


def test_a_fenced_learner_stops_with_one_line(core):
    loop = Loop(core.address)
    core.fail("Push", grpc.StatusCode.FAILED_PRECONDITION, "this learner was started again elsewhere")
    core.open(0)
    with pytest.raises(LearnerError, match="started again elsewhere"), loop.learner:
        loop.until(lambda: False)


def test_a_stranger_that_answers_on_the_cores_port_does_not_end_training(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        core.stop()
        stranger = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        stranger.add_insecure_port(core.address)
        stranger.start()
        loop.until(lambda: "unimplemented" in learner.stats().last_error)
        stranger.stop(0).wait()
        core.start()
        loop.until(lambda: learner.stats().connected)
        flown(loop, core)


def test_a_receipt_of_a_merge_alone_is_not_adopted(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        core.lose_acknowledgement = True
        flown(loop, core)
        core.merge(0, tell=False)  # the repeated Push gets "merged", but the update is not announced yet
        for _ in range(50):
            loop.turn()
        assert (learner.stats().versions[0], learner.stats().pending) == (0, 1)
        core.merge(0)
        loop.until(lambda: learner.stats().versions[0] == 2)
        assert learner.stats().merged == 1
        assert core.receipts[("a", 1, 0, 1)].fate == pb.FATE_MERGED
