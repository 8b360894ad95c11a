"""Starting and closing a learner without a `with` block, and the ends of processes that do not close it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
from atoll import LearnerError

from tests.learner.loops import Loop, Two, until

SCRIPT = """
import signal, sys, torch, atoll
model = torch.nn.Linear(24, 24)
learner = atoll.Learner(model, torch.optim.SGD(model.parameters(), 0.1), "{address}", "a")
{before}
learner.start()
learner.step(1)
print("trains", flush=True)
{after}
"""


@pytest.fixture
def process(core):
    """Returns a function that starts a learner in a separate process and waits until it trains."""
    core.fragments = 1
    begun = list[subprocess.Popen[str]]()

    def begin(*, before: str = "", after: str = "sys.stdin.read()") -> subprocess.Popen[str]:
        script = SCRIPT.format(address=core.address, before=before, after=after)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        begun.append(subprocess.Popen([sys.executable, "-c", script], text=True, **pipes))
        assert begun[-1].stdout.readline() == "trains\n", begun[-1].communicate()[1]
        return begun[-1]

    yield begin
    for each in begun:
        each.kill()
        each.communicate()


def test_start_and_close_have_the_effect_of_the_block(core):
    loop = Loop(core.address)
    loop.learner.close()  # has no effect before the start
    assert loop.learner.start() is loop.learner
    loop.turn(tokens=70)
    loop.learner.close()
    loop.learner.close()
    assert {core.headers[key].tokens for f in (0, 1) for key in core.pending(f)} == {70}
    assert core.left == ["a"]
    with pytest.raises(LearnerError, match="started only once"):
        loop.learner.start()


def test_closing_without_draining_sends_nothing(core):
    loop = Loop(core.address)
    loop.learner.start()
    loop.turn()
    loop.learner.close(drain=False)
    assert core.left == ["a"]
    assert not core.headers


def test_a_second_start_of_a_name_closes_the_first(core, said):
    first, second = Loop(core.address), Loop(core.address)
    first.learner.start()
    first.turn()
    second.learner.start()
    assert core.left == ["a"]
    assert any("earlier learner of the same name" in each["event"] for each in said)
    with pytest.raises(LearnerError, match="has left the run"):
        first.turn()
    second.turn()
    other = Loop(core.address, "b")
    other.learner.start()
    second.turn()  # a learner with another name closes none
    for loop in (second, other):
        loop.learner.close()
    assert sorted(core.left) == ["a", "a", "b"]


def test_a_learner_of_another_living_thread_is_not_closed(core):
    theirs, mine = Loop(core.address), Loop(core.address)
    started, end = threading.Event(), threading.Event()

    def train() -> None:
        with theirs.learner:
            started.set()
            end.wait(60)
            theirs.turn()

    thread = threading.Thread(target=train)
    thread.start()
    assert started.wait(60)
    mine.learner.start()
    assert not core.left
    end.set()
    thread.join()
    mine.learner.close()
    assert core.left == ["a", "a"]


def test_after_a_failed_start_closing_does_nothing():
    loop = Loop("127.0.0.1:1", connect_timeout_s=0.1)
    with pytest.raises(LearnerError, match="could not join the run"):
        loop.learner.start()
    loop.learner.close()


def test_a_join_logs_one_line_with_the_origin_of_the_parameters(core, said):
    with Loop(core.address).learner:
        core.run_tokens = 12_345
        with Loop(core.address, "b").learner:
            pass
    lines = [each for each in said if each["event"].startswith("joined at")]
    assert [line["event"] for line in lines] == [
        "joined at 0 tokens: the model gave the run its initial parameters",
        "joined at 12,345 tokens: the model now has the run's parameters",
    ]
    assert {line["trainable"] for line in lines} == {"1,152 of 1,152 parameters"}


def test_the_line_counts_frozen_parameters(core, said):
    model = Two()
    model.second.requires_grad_(False)
    core.fragments = 1
    with Loop(core.address, model=model).learner:
        pass
    assert [each["trainable"] for each in said if "trainable" in each] == ["576 of 1,152 parameters"]


def test_a_step_in_another_thread_is_refused_in_one_line(core):
    loop = Loop(core.address)
    errors = list[str]()

    def step() -> None:
        try:
            loop.learner.step(1)
        except LearnerError as error:
            errors.append(str(error))

    with loop.learner:
        thread = threading.Thread(target=step, name="loader")
        thread.start()
        thread.join()
        loop.turn()
    (line,) = errors
    assert line.startswith("step() was called in thread loader, but thread MainThread started the learner: call step()")
    assert loop.learner.stats().steps == 1


# ---------------------------------------------------------------------------------- processes that end


def test_sigterm_leaves_the_run_and_ends_the_process(core, process):
    child = process()
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGTERM
    assert core.left == ["a"]
    assert "Traceback" not in errors


@pytest.mark.ci
@pytest.mark.parametrize("early", [True, False])
def test_a_programs_own_sigterm_handler_replaces_atolls(core, process, early):
    # os.write, because the signal may interrupt print, and a second print inside the first one raises RuntimeError
    own = "import os; signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'mine\\n'))"
    still = "sys.stdin.readline(); learner.step(1); print('still', flush=True); learner.close()"
    child = process(before=own if early else "", after=("" if early else own + "; print('set', flush=True)\n") + still)
    if not early:
        assert child.stdout.readline() == "set\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "mine\n"
    assert not core.left
    out, errors = child.communicate("\n", timeout=30)
    assert (out, child.returncode) == ("still\n", 0), errors
    assert core.left == ["a"]


def test_after_the_last_learner_sigterm_has_its_default_handler(core, process):
    """In a separate process, because another test's learner may still be open in this one."""
    child = process(
        after="other = torch.nn.Linear(24, 24)\n"
        f"second = atoll.Learner(other, torch.optim.SGD(other.parameters(), 0.1), '{core.address}', 'b').start()\n"
        "handlers = [signal.getsignal(signal.SIGTERM)]\n"
        "for each in (second, learner):\n"
        "    each.close(); handlers.append(signal.getsignal(signal.SIGTERM))\n"
        "print([each is signal.SIG_DFL for each in handlers])"
    )
    out, errors = child.communicate(timeout=60)
    assert (out, child.returncode) == ("[False, False, True]\n", 0), errors


def test_a_child_process_ends_on_sigterm_without_effect_on_the_learner(core, process):
    fork = "import os, time\nif not (child := os.fork()): print('child', flush=True); time.sleep(60)\n"
    parent = process(
        after=fork + "sys.stdin.readline(); os.kill(child, signal.SIGTERM)\n"
        "print(os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True); learner.step(1); learner.close()"
    )
    assert parent.stdout.readline() == "child\n"
    out, errors = parent.communicate("\n", timeout=30)
    assert (out, parent.returncode) == (f"{int(signal.SIGTERM)}\n", 0), errors
    assert core.left == ["a"]


@pytest.mark.ci
@pytest.mark.parametrize("end", ["", "raise ZeroDivisionError", "sys.exit(3)"])
def test_a_process_that_ends_without_closing_leaves_the_run(core, process, end):
    child = process(after=end)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == {"": 0, "sys.exit(3)": 3}.get(end, 1), errors
    until(lambda: core.left == ["a"])
