"""Loops of single inner steps, for tests that need no real training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from atoll import Learner
from torch import nn

torch.set_num_threads(1)
BREATH = threading.Event()  # never set; loops wait on it between steps


class Two(nn.Module):
    """A model with two fragments of one matrix each."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)


class Loop:
    """A model and its learner. `turn` takes one inner step, which moves every parameter."""

    def __init__(self, address: str, name: str = "a", *, model: nn.Module | None = None, **options: object) -> None:
        self.model = model if model is not None else Two()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        settings = {"connect_timeout_s": 20.0, "drain_s": 5.0} | options
        self.learner = Learner(self.model, optimizer, address, name, **settings)
        self.longest_step_s = 0.0
        self.moved = [np.zeros(tuple(p.shape)) for p in self.model.parameters()]
        self._random = torch.Generator().manual_seed(1)

    def turn(self, tokens: int = 10) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.model.parameters()):
                before = parameter.double().numpy().copy()
                parameter.add_(torch.randn(parameter.shape, generator=self._random) * 0.01)
                self.moved[index] += before - parameter.double().numpy()
        began = time.perf_counter()
        self.learner.step(tokens=tokens)
        self.longest_step_s = max(self.longest_step_s, time.perf_counter() - began)

    def until(self, found: Callable[[], object], timeout_s: float = 15.0) -> None:
        """Takes inner steps until `found` returns a true value."""
        end = time.monotonic() + timeout_s
        while not found():
            assert time.monotonic() < end, f"no success within {timeout_s} s: {self.learner.stats()}"
            self.turn()
            BREATH.wait(0.01)


def until(found: Callable[[], object], timeout_s: float = 15.0) -> None:
    """Waits without training until `found` returns a true value."""
    end = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < end, f"the condition did not hold within {timeout_s} s"
        BREATH.wait(0.01)
