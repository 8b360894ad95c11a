"""`Learner.step()` with nothing due costs microseconds, and with something due gives the interpreter away rarely."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import torch
from atoll import adoption
from atoll.adoption import Fate, Outstanding
from atoll.handover import Prepared, Taken
from atoll.island import Alone
from atoll.learner import Learner
from atoll.local import Local
from atoll.parameters import Parameters
from atoll_wire.layout import plan


class Deaf:
    """An agent without a core."""

    failure = None

    def __init__(self) -> None:
        self.taken: list[Outstanding] = []

    def submit(self, taken: Taken) -> None:
        self.taken.append(taken.outstanding)


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
    """Each time a step gives the interpreter away, such a thread keeps it for a switch interval."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40)))
    learner, agent = Learner(model, torch.optim.SGD(model.parameters(), 0.1), server="127.0.0.1:1", name="a"), Deaf()
    learner._island, learner._agent = Alone(), agent
    parameters = learner._parameters = Parameters(model, learner._optimizer)
    layout = learner._layout = plan(parameters.tensors, 2)
    first = [(1, np.zeros(fragment.length, np.float32)) for fragment in layout.fragments]
    tracks = (local := Local(parameters, layout, first, keep=True)).tracks
    learner._local = local
    adoption.warm_up()
    done = threading.Event()
    hog = threading.Thread(target=lambda: all(iter(lambda: not done.is_set(), False)))
    hog.start()
    try:
        times = []
        for version in range(2, 12):
            learner._handover.ask(0, version)
            learner.step(tokens=1)
            flying = agent.taken.pop()
            learner.step(tokens=1)
            learner._handover.offer(Prepared(0, version, flying.vector + 1, Fate(flying.vector)))
            learner._handover.ask(1, version)
            began = time.perf_counter()
            learner.step(tokens=1)
            times.append(time.perf_counter() - began)
            tracks[1].refused()
            agent.taken.clear()
    finally:
        done.set()
        hog.join()
    assert [track.version for track in tracks] == [11, 1]
    assert sorted(times)[len(times) // 2] < 10 * sys.getswitchinterval()
