"""`Learner.step()` with nothing due costs microseconds, and with something due gives the interpreter away rarely."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
import torch
from atoll import places
from atoll.adoption import Fate, Outstanding
from atoll.errors import LearnerError
from atoll.handover import Prepared, Taken
from atoll.island import Alone
from atoll.learner import Learner
from atoll.local import Local
from atoll.parameters import Optimizers, Parameters
from atoll.windows import Windows
from atoll_wire.codec import Codec
from atoll_wire.layout import plan

torch.set_num_threads(1)  # what is counted is the interpreter's switches


class Deaf:
    """An agent without a core."""

    failure = None

    def __init__(self) -> None:
        self.taken: list[Outstanding] = []

    def submit(self, taken: Taken) -> None:
        self.taken.append(taken.outstanding)


def joined(model: torch.nn.Module, optimizer: Optimizers | None = None) -> tuple[Learner, Local, Deaf]:
    """A learner of two fragments at version 1, zeros."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    learner, agent = Learner(model, optimizer, server="127.0.0.1:1", name="a"), Deaf()
    learner._island, learner._agent = Alone(), agent
    parameters = learner._parameters = Parameters(model, learner._optimizer)
    layout = learner._layout = plan(parameters.tensors, 2)
    first = [(1, np.zeros(fragment.length, np.float32)) for fragment in layout.fragments]
    local = learner._local = Local(Windows(parameters.values, layout, Codec.INT4), first, keep=True)
    return learner, local, agent


def test_a_step_with_nothing_due_costs_microseconds():
    model = torch.nn.Linear(2, 2)
    learner = Learner(model, torch.optim.SGD(model.parameters(), 0.1), server="127.0.0.1:1", name="a")
    learner._island = Alone()  # entered, with an agent that has nothing to say
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        learner.step(tokens=1)
        times.append(time.perf_counter() - began)
    assert sorted(times)[len(times) // 2] < 20e-6
    assert learner.stats().steps == 2000


def test_a_busy_thread_beside_training_gets_few_chances_to_hold_a_step_up():
    """Each time a step gives the interpreter away, such a thread keeps it for a switch interval: long here, so that
    they can be counted."""
    learner, local, agent = joined(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16))))
    places.warm_up()
    done = threading.Event()
    hog = threading.Thread(target=lambda: all(iter(lambda: not done.is_set(), False)))
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(0.05)
    hog.start()
    try:
        times = []
        for version in range(2, 7):
            learner._handover.ask(0, version)
            learner.step(tokens=1)
            flying = agent.taken.pop()
            learner.step(tokens=1)
            learner._handover.offer(Prepared(0, version, local.tracks[0].anchor + 1, Fate(flying.coded)))
            learner._handover.ask(1, version)
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
    assert sorted(times)[len(times) // 2] < 12 * 0.05, "a few for each, not one for each tensor"


def test_a_loop_that_goes_on_after_an_interrupted_adoption_is_told_so(monkeypatch):
    learner, local, _ = joined(torch.nn.Linear(4, 4))

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Windows, "write", fail)
    learner._handover.offer(Prepared(0, 2, local.tracks[0].anchor + 1, Fate()))
    with pytest.raises(MemoryError):
        learner.step(tokens=1)
    with pytest.raises(LearnerError, match="interrupted"):
        learner.step(tokens=1)


def test_a_loop_that_gives_its_optimizer_more_parameters_is_told_so_at_its_next_step():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4).requires_grad_(False)})
    learner, _, _ = joined(model, torch.optim.SGD(model["a"].parameters(), 0.1))
    learner.step(tokens=1)
    learner._optimizer.add_param_group({"params": list(model["b"].requires_grad_(True).parameters())})
    with pytest.raises(LearnerError, match=r"b\.weight"):
        learner.step(tokens=1)
