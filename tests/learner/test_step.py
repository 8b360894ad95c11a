"""`Learner.step()` with nothing due costs microseconds."""

from __future__ import annotations

import time

import torch
from atoll.island import Alone
from atoll.learner import Learner


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
