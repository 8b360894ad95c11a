"""Entering, stepping, pausing and leaving, as seen by a user's loop."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
import torch
from atoll import Learner, LearnerError
from atoll.transfers.call_errors import GOODBYE_S

from tests.learner.fake_core import fake_core
from tests.learner.loops import BREATH, Loop, Two, until


@pytest.fixture
def core():
    with fake_core() as it:
        yield it


def agents() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("atoll ")]


@contextlib.contextmanager
def ends_within(seconds: float):
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def test_a_constructor_opens_no_connection_and_a_learner_is_entered_once(core):
    loop = Loop(core.address)
    assert not core.joins
    with loop.learner as learner:
        pass
    with pytest.raises(LearnerError, match="started only once"):
        learner.__enter__()


def test_a_step_outside_of_the_block_gives_a_one_line_error():
    with pytest.raises(LearnerError, match="was not started"):
        Learner(Two(), torch.optim.SGD(Two().parameters(), 0.1), "127.0.0.1:1", "a").step(1)


def test_a_core_that_hangs_does_not_stop_an_inner_step(core):
    loop = Loop(core.address)
    with loop.learner:
        core.open(0)
        loop.until(lambda: core.pending(0))
        core.hang()
        core.open(1)
        for _ in range(100):
            loop.turn()
            BREATH.wait(0.005)
        core.go_on()
        assert loop.longest_step_s < 0.1
        loop.until(lambda: core.pending(1))


def test_leaving_sends_outstanding_work(core):
    loop = Loop(core.address)
    with loop.learner:
        loop.turn(tokens=70)
    assert {core.headers[key].tokens for f in (0, 1) for key in core.pending(f)} == {70}
    assert core.left == ["a"]


def test_leaving_sends_later_work_after_the_contribution_in_flight_is_merged(core):
    loop = Loop(core.address)
    with ends_within(15.0), loop.learner:
        core.open(0)
        loop.until(lambda: core.pending(0))
        loop.turn(tokens=500)
        first = core.pending(0)[0]
        threading.Timer(0.5, core.merge, (0,)).start()
    assert core.receipts[first].version == 1
    (second,) = core.pending(0)
    assert core.headers[second].tokens >= 500


def test_leaving_waits_for_a_missing_fate_at_most_as_long_as_a_round(core):
    """No round closes, because all learners leave at the same time."""
    loop = Loop(core.address, drain_s=30.0)
    with ends_within(8.0), loop.learner:
        core.open(0)
        loop.until(lambda: core.pending(0))
        loop.turn(tokens=500)
    assert core.left == ["a"]


def test_leaving_waits_for_a_hanging_core_at_most_drain_s_and_the_time_of_a_leave(core):
    loop = Loop(core.address, drain_s=1.0)
    with loop.learner:
        loop.turn()
        core.hang()
        began = time.monotonic()
    assert 1.0 < time.monotonic() - began < 1.0 + GOODBYE_S + 1.5


def test_leave_is_sent_without_draining(core):
    loop = Loop(core.address, drain_s=0.0)
    with loop.learner:
        loop.turn()
    assert core.left == ["a"]


def test_an_error_in_the_loop_skips_draining_leaves_and_is_raised(core):
    loop = Loop(core.address)
    with pytest.raises(ZeroDivisionError), loop.learner:
        loop.until(lambda: 0 // (3 - loop.learner.stats().steps))
    assert core.left == ["a"]
    assert not core.headers


def test_ctrl_c_while_draining_still_sends_leave(core, monkeypatch):
    before = agents()  # other tests may have left threads in this process that still call a core
    loop = Loop(core.address)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.learner._exchange, "wait_settled", interrupted)
    with pytest.raises(KeyboardInterrupt), loop.learner:
        loop.turn()
    assert core.left == ["a"]
    until(lambda: set(agents()) <= set(before))


def test_ctrl_c_during_a_start_leaves_no_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background processes ignore it
    before = agents()
    loop = Loop("127.0.0.1:1")
    this = threading.get_ident()
    threading.Timer(1.0, signal.pthread_kill, (this, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        loop.learner.__enter__()
    until(lambda: set(agents()) <= set(before))


def test_being_fenced_while_draining_ends_the_wait_at_once(core):
    loop = Loop(core.address, drain_s=30.0)
    with ends_within(10.0), loop.learner:
        loop.turn()
        core.fail("Push", grpc.StatusCode.FAILED_PRECONDITION, "this learner was started again elsewhere", times=2)


def test_paused_time_is_neither_stepping_nor_blocked(core):
    loop = Loop(core.address)
    with loop.learner as learner:
        loop.turn()
        before = learner.stats()
        with learner.pause():
            with learner.pause():
                BREATH.wait(0.2)
            assert learner._counters.paused
            BREATH.wait(0.1)
        loop.turn()
        after = learner.stats()
    assert 0.3 <= after.paused_s - before.paused_s < 0.6, "nested pauses must count once"
    assert learner._counters.step_time_s < 0.2, "pauses must not count as step time"
    assert after.stepping_s - before.stepping_s < 0.2
    assert after.blocked_s - before.blocked_s < 0.1


def test_after_leaving_a_step_gives_a_one_line_error_and_stats_stay(core):
    loop = Loop(core.address, drain_s=0.3)
    with loop.learner as learner:
        loop.turn()
        assert learner.stats().connected
        core.fail("Push", grpc.StatusCode.UNAVAILABLE, times=1000)
    assert (learner.stats().connected, learner.stats().pending) == (False, 2), "both contributions must be pending"
    with pytest.raises(LearnerError, match="has left the run"):
        loop.turn()


def test_the_error_that_ends_a_program_is_its_last_line(core):
    script = f"""
import atexit, sys, torch, atoll
model = torch.nn.Linear(24, 24)
learner = atoll.Learner(model, torch.optim.SGD(model.parameters(), 0.1), "{core.address}", "a").__enter__()
atexit.register(sys.stdin.read)  # after the interpreter's pools have closed
learner.step(1)
print("steps", flush=True)
raise RuntimeError("the trainer's own")
"""
    core.fragments = 1
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **streams) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "steps\n"
        said = []
        while not (said and said[-1].startswith("RuntimeError")):
            said.append(child.stderr.readline())
        fetched = len(core.fetches)
        core.merge(0)
        until(lambda: len(core.fetches) > fetched)
        _, rest = child.communicate("", timeout=30)
    assert rest == "", "no log line may follow the error"


@pytest.mark.parametrize("left", [pytest.param(True, marks=pytest.mark.ci), False])
def test_the_interpreter_ends_whether_or_not_the_block_was_left(core, left):
    script = f"""
import torch, atoll
model = torch.nn.Linear(24, 24)
learner = atoll.Learner(model, torch.optim.SGD(model.parameters(), 0.1), "{core.address}", "a", drain_s=2.0)
learner.__enter__()
learner.step(1)
{"learner.__exit__(None, None, None)" if left else ""}
print("end")
"""
    core.fragments = 1
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "end"), done.stderr
    assert "Traceback" not in done.stderr
