"""Optimizer steps that a gradient scaler skipped do not count, and their tokens count with the next step."""

from __future__ import annotations

import pytest
import torch
from atoll import Learner
from torch import nn

from tests.devices import CPU, DEVICES
from tests.learner.loops import Two, until

SETTINGS = {"connect_timeout_s": 20.0, "drain_s": 5.0}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
}


class Scaled:
    """A loop with a gradient scaler, whose gradients may overflow."""

    def __init__(self, address: str, kind: str, name: str = "a", device: torch.device = CPU) -> None:
        self.model = Two().to(device)
        self._ones = torch.ones(2, 24, device=device)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        self.learner = Learner(self.model, self.optimizer, address, name, **SETTINGS)

    def turn(self, *, overflows: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = self.model.second(self.model.first(self._ones)).square().mean()
        self.scaler.scale(loss).backward()
        if overflows:
            self.model.first.weight.grad[0, 0] = float("inf")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.learner.step(tokens=10)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_does_not_count_but_its_tokens_count_with_the_next(core, kind, device):
    loop = Scaled(core.address, kind, device=device)
    with loop.learner as learner:
        for number in range(12):
            before = loop.model.first.weight.detach().clone()
            loop.turn(overflows=number in {3, 4, 9})
            assert torch.equal(before, loop.model.first.weight) == (number in {3, 4, 9})
            if number == 4:
                assert (learner.stats().steps, learner.stats().tokens) == (3, 30)
        stats = learner.stats()
    assert (stats.steps, stats.tokens, stats.skipped) == (9, 120, 3)
    assert {header.tokens for header in core.headers.values()} == {120}
    assert {header.steps for header in core.headers.values()} == {9}
    assert core.progress[-1].tokens == 120


def test_updates_are_adopted_at_skipped_steps(core):
    loop, other = Scaled(core.address, "sgd"), Scaled(core.address, "sgd", "b")
    with loop.learner as learner, other.learner:
        loop.turn()
        other.turn()
        core.open(0)
        until(lambda: other.turn() or any(key[0] == "b" for key in core.pending(0)))
        core.merge(0)
        until(lambda: loop.turn(overflows=True) or learner.stats().versions[0] == 1)
        assert learner.stats().steps == 1


def test_a_call_per_micro_batch_counts_the_optimizers_steps_and_all_tokens(core):
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Learner(model, optimizer, core.address, "a", **SETTINGS) as learner:
        optimizer.step()
        learner.step(tokens=10)
        for number in range(12):
            if number % 4 == 3:
                optimizer.step()
            learner.step(tokens=10)
        assert (learner.stats().steps, learner.stats().tokens) == (4, 130)


def test_a_step_with_one_of_two_optimizers_skipped_counts(core):
    model = Two()
    first, second = (torch.optim.SGD(part.parameters(), 0.01) for part in (model.first, model.second))
    with Learner(model, [first, second], core.address, "a", **SETTINGS) as learner:
        for number in range(6):
            model.second(model.first(torch.ones(2, 24))).square().mean().backward()
            if number % 2:
                first.step()
            second.step()
            learner.step(tokens=10)
        assert (learner.stats().steps, learner.stats().skipped) == (6, 0)


def test_a_loop_that_moves_parameters_without_an_optimizer_is_not_skipped(core):
    """Optimizers that are no torch.optim.Optimizer call no hooks."""
    loop = Scaled(core.address, "sgd")
    with loop.learner as learner:
        learner.step(tokens=10)  # the hooks have seen no step yet
        loop.turn()
        with torch.no_grad():
            loop.model.first.weight.add_(0.001)
        learner.step(tokens=10)
        learner.step(tokens=10)
        assert (learner.stats().steps, learner.stats().skipped) == (3, 1)


def test_steps_of_another_models_optimizer_do_not_count(core):
    loop, other = Scaled(core.address, "sgd"), nn.Linear(2, 2)
    elsewhere = torch.optim.SGD(other.parameters(), 0.1)
    with loop.learner as learner:
        loop.turn()
        other(torch.ones(2)).sum().backward()
        elsewhere.step()
        learner.step(tokens=10)
        assert (learner.stats().steps, learner.stats().skipped) == (1, 1)
