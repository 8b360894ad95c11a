"""Schedules that follow the run's tokens."""

from __future__ import annotations

import math

import pytest
import torch
from atoll.integrations.run_schedule import RunSchedule
from torch.optim import lr_scheduler

KINDS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 40),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [10, 30], 0.5),
}


def made(kind, rate=1.0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], rate)
    return optimizer, KINDS[kind](optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_follows_the_runs_share_of_the_schedule(kind):
    optimizer, scheduler = made(kind)
    alone, usual = made(kind)
    follows, rates = RunSchedule(scheduler, 40), []
    for _ in range(40):
        rates.append(alone.param_groups[0]["lr"])
        alone.step()
        usual.step()
    for step in (0, 1, 17, 39):
        follows.follow(step * 100, 4000)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[step])
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    follows.follow(9000, 4000)  # other learners train, too
    optimizer.step()
    assert scheduler.last_epoch == 40


def test_a_rate_may_be_a_tensor_and_a_wrapped_scheduler_is_unwrapped():
    class Wrapped:
        def __init__(self, scheduler):
            self.scheduler = scheduler

    optimizer, scheduler = made("lambda", torch.tensor(1.0))
    rate = optimizer.param_groups[0]["lr"]
    RunSchedule(Wrapped(scheduler), 40).follow(1000, 4000)
    assert rate.item() == pytest.approx(0.75)


def test_without_a_target_or_length_the_schedule_follows_own_steps():
    optimizer, scheduler = made("lambda")
    RunSchedule(scheduler, 40).follow(1000, 0)
    RunSchedule(scheduler, math.inf).follow(1000, 4000)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_scheduler_whose_rates_cannot_be_computed_is_left_alone_with_one_warning(said):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 1.0)
    follows = RunSchedule(lr_scheduler.ReduceLROnPlateau(optimizer), 40)
    for _ in range(3):
        follows.follow(1000, 4000)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert [each["scheduler"] for each in said] == ["ReduceLROnPlateau"]
