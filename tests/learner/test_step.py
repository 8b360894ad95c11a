"""`Learner.step()` without due work takes microseconds, and with due work rarely releases the GIL."""

from __future__ import annotations

import linecache
import sys
import threading
import time
from types import FrameType, SimpleNamespace

import numpy as np
import pytest
import torch
from atoll.boundary.host_memory import HostMemory
from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.round_answers import RoundAnswers
from atoll.data.unit_log import UnitLog
from atoll.errors import LearnerError
from atoll.fragments import segments
from atoll.fragments.adoption import Fate, PreparedAnchor, PseudoGradient
from atoll.fragments.exchange import Submission, ThreadExchange
from atoll.learner import Learner
from atoll.model.parameters import Optimizers, Parameters
from atoll.ranks.division import undivided
from atoll.ranks.rank_group import ALONE
from atoll.stats import Counters
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import plan
from atoll_wire.process.clock import SYSTEM

torch.set_num_threads(1)  # the test counts the interpreter's thread switches


class Deaf:
    """An agent without a core."""

    failure = None
    run_codec = Codec.INT4

    def __init__(self) -> None:
        self.taken: list[PseudoGradient] = []

    def submit(self, taken: Submission) -> None:
        if not taken.received:  # like `Sender`
            taken.received = True
            self.taken.append(taken.outstanding)


def joined(model: torch.nn.Module, optimizer: Optimizers | None = None) -> tuple[Learner, LocalParameters, Deaf]:
    """Returns a learner with two fragments at version 1, whose values are zero."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    learner, agent = Learner(model, optimizer, server="127.0.0.1:1", name="a"), Deaf()
    learner._ranks, learner._agent = ALONE, agent
    parameters = learner._parameters = Parameters(model, learner._optimizer)
    layout = plan(parameters.tensors, 2)
    first = [
        PreparedAnchor(fragment.index, 1, np.zeros(fragment.length, np.float32), Fate())
        for fragment in layout.fragments
    ]
    learner._take_over(parameters, layout, agent, undivided(layout), first)
    return learner, learner._boundary.local, agent


def test_a_step_without_due_work_takes_microseconds():
    """Compares each step with 300 calls of an empty function, so that a busy or slow machine changes both times."""
    learner, _, _ = joined(torch.nn.Linear(2, 2))
    times: list[list[float]] = [[], []]
    for _ in range(2000):
        began = time.perf_counter()
        learner.step(tokens=1)
        stepped = time.perf_counter()
        for _ in range(300):
            _nothing()
        times[0].append(stepped - began)
        times[1].append(time.perf_counter() - stepped)
    step_s, calls_s = (sorted(each)[len(each) // 2] for each in times)
    print(f"a step takes {1e6 * step_s:.1f} us, 300 calls take {1e6 * calls_s:.1f} us")
    assert step_s < 4 * calls_s  # on a quiet machine, 14 us vs. 9 us
    assert learner.stats().steps == 2000


def _nothing() -> None:
    pass


def test_a_step_rarely_releases_the_gil_to_a_busy_thread():
    """Each time that a step releases the GIL, a busy thread keeps it for a switch interval.

    The interval is long here, so that the step's time shows their number.
    """
    learner, local, agent = joined(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16))))
    segments.warm_up()
    done = threading.Event()
    hog = threading.Thread(target=lambda: all(iter(lambda: not done.is_set(), False)))
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.05)
    hog.start()
    try:
        times = []
        for version in range(2, 7):
            learner._exchange.ask(0, version)
            learner.step(tokens=1)
            flying = agent.taken.pop()
            learner.step(tokens=1)
            learner._exchange.offer(PreparedAnchor(0, version, local.tracks[0].anchor + 1, Fate(flying.coded)))
            learner._exchange.ask(1, version)
            began = time.perf_counter()
            learner.step(tokens=1)
            times.append(time.perf_counter() - began)
            local.tracks[1].refused()
            agent.taken.clear()
    finally:
        sys.setswitchinterval(usual_s)
        done.set()
        hog.join()
    assert [track.version for track in local.tracks] == [6, 1]
    # On a busy machine, other processes prolong some steps.
    assert min(times) < 12 * 0.05, "a step may release the GIL a few times, not once per tensor"


def test_a_step_after_an_interrupted_adoption_raises_an_error(monkeypatch):
    learner, local, _ = joined(torch.nn.Linear(4, 4))

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(HostMemory, "write", fail)
    learner._exchange.offer(PreparedAnchor(0, 2, local.tracks[0].anchor + 1, Fate()))
    with pytest.raises(MemoryError):
        learner.step(tokens=1)
    with pytest.raises(LearnerError, match="interrupted"):
        learner.step(tokens=1)


def test_an_exception_that_interrupts_no_grad_leaves_gradients_on(monkeypatch):
    """`torch.no_grad` is written in Python: an exception at its end skips the restoration of the previous mode."""
    learner, local, _ = joined(torch.nn.Linear(4, 4))
    monkeypatch.setattr(torch.no_grad, "__exit__", lambda *_: (_ for _ in ()).throw(Tick))
    learner._exchange.offer(PreparedAnchor(0, 2, local.tracks[0].anchor + 1, Fate()))
    with pytest.raises(Tick):
        learner.step(tokens=1)
    monkeypatch.undo()
    assert torch.is_grad_enabled()


class Tick(Exception):
    """The exception of a signal handler, such as a watchdog's. The loop catches it."""


def interrupted(learner: Learner, line: int) -> bool:
    """Interrupts a step at the given line of Atoll's code. Returns whether it reached this line."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal count
        file = frame.f_code.co_filename
        if "/atoll/" not in file or event not in {"line", "return"}:
            return trace
        if not linecache.getline(file, frame.f_lineno).lstrip().startswith("with "):  # handles signals at its exit
            count += 1
            if count == line:
                sys.settrace(None)
                raise Tick
        return trace

    sys.settrace(trace)
    try:
        learner.step(tokens=1)
    except Tick:
        return True
    finally:
        sys.settrace(None)
    return False


def test_the_next_step_completes_work_that_a_signal_interrupted():
    line = 0
    while True:
        line += 1
        learner, local, agent = joined(torch.nn.Linear(4, 4))
        exchange = learner._exchange
        learner.step(tokens=1)
        local.tracks[1].flying = (1, 1)
        exchange.release(1)
        for fragment in (0, 1):
            exchange.ask(fragment, 7)
        if not interrupted(learner, line):
            break
        learner.step(tokens=1)
        assert len(agent.taken) == 2, f"interrupted at line {line}: each fragment must be sent once"
        assert all(track.flying for track in local.tracks)
        assert not exchange.todo
    assert line > 50, "the test must cover the whole step"


def test_an_interrupted_adoption_is_completed_by_the_next_step_or_ends_the_learner():
    line = done = told = 0
    while True:
        line += 1
        learner, local, agent = joined(torch.nn.Linear(4, 4))
        learner._exchange.ask(0, 7)
        learner.step(tokens=1)
        anchor = local.tracks[0].anchor + 1
        learner._exchange.offer(PreparedAnchor(0, 2, anchor, Fate(agent.taken[0].coded)))
        if not interrupted(learner, line):
            break
        try:
            learner.step(tokens=1)
            done += 1
            assert (local.tracks[0].version, local.tracks[0].flying) == (2, None)
            assert [each.version for each in learner._exchange.adopted] == [2]
        except LearnerError as error:
            assert "interrupted" in str(error)
            told += 1
    assert min(done, told) > 10, "the test must cover the whole step"


def test_a_rank_that_does_not_decide_keeps_no_contribution_that_was_sent():
    """Only rank 0 reads `uncoded`."""
    taken = [Submission(0, cycle, SimpleNamespace(is_coded=True)) for cycle in range(3)]
    rounds = RoundAnswers(SimpleNamespace(tracks=[]), ThreadExchange(SYSTEM), Counters(), lambda _: None, UnitLog())
    for number, each in enumerate(taken, 1):
        rounds.kept_back.append((number, each))
        rounds.hand_over(number)
    rounds.hand_over()
    assert rounds._sent == []


@pytest.mark.parametrize("tokens", [8.0, "8", None, True, -1, 1 << 64, torch.tensor(8.0)])
def test_an_invalid_number_of_tokens_is_refused_at_once_in_one_line(tokens):
    learner, _, _ = joined(torch.nn.Linear(4, 4))
    with pytest.raises(LearnerError, match="is not an integer"):
        learner.step(tokens=tokens)
    assert learner.stats().steps == 0


def test_steps_without_tokens_give_no_contribution():
    learner, _, agent = joined(torch.nn.Linear(4, 4))
    learner._exchange.ask(0, 7)
    learner.step(tokens=0)
    assert not agent.taken
    assert [each.reason for each in learner._exchange.declined] == ["its steps had no tokens"]


def test_numbers_of_other_libraries_and_a_loss_with_its_graph_are_accepted():
    learner, _, _ = joined(torch.nn.Linear(4, 4))
    learner.step(tokens=np.int64(8), loss=torch.ones(1, requires_grad=True).sum())
    learner.step(tokens=torch.tensor(8))
    assert (learner.stats().tokens, type(learner._counters.tokens), learner._counters.loss) == (16, int, 1.0)
    with pytest.raises(LearnerError, match="one number"):
        learner.step(tokens=8, loss="low")


def test_parameters_added_to_the_optimizer_raise_an_error_at_the_next_step():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4).requires_grad_(False)})
    learner, _, _ = joined(model, torch.optim.SGD(model["a"].parameters(), 0.1))
    learner.step(tokens=1)
    learner._optimizer.add_param_group({"params": list(model["b"].requires_grad_(True).parameters())})
    with pytest.raises(LearnerError, match=r"b\.weight"):
        learner.step(tokens=1)
