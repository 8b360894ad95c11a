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


def warm_up_and_cosine(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8), lr_scheduler.CosineAnnealingLR(optimizer, 32)]
    return lr_scheduler.SequentialLR(optimizer, parts, [8])


def restarts_after_a_warm_up(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 5), lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 6, 2)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


def chained(optimizer):
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


# Schedulers whose rates can be found only by stepping a copy.
STEPPED = {
    "warm-up and cosine": warm_up_and_cosine,
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [2.0, 0.2], total_steps=40),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 6, 2),
    "restarts after a warm-up": restarts_after_a_warm_up,
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9 + step / 1000),
    "chained": chained,
}


def made(kind, rate=1.0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], rate)
    return optimizer, KINDS[kind](optimizer)


def made_with_two_groups(kind):
    """Returns an AdamW with two groups and its scheduler, and a function that returns the values of both groups."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": rate} for rate in (1.0, 0.1)]
    optimizer = torch.optim.AdamW(groups)
    scheduler = STEPPED[kind](optimizer)
    return optimizer, scheduler, lambda: [(group["lr"], group["betas"]) for group in optimizer.param_groups]


def own_values(kind):
    """Returns the values of each own step from 0 to 40."""
    optimizer, scheduler, values = made_with_two_groups(kind)
    found = [values()]
    for _ in range(40):
        optimizer.step()
        scheduler.step()
        found.append(values())
    return found


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", STEPPED)
def test_rates_and_momenta_that_need_stepping_follow_the_runs_tokens(kind, said):
    expected = own_values(kind)
    assert len(set(map(str, expected))) > 20, "the schedule must change"
    optimizer, scheduler, values = made_with_two_groups(kind)
    follows = RunSchedule(scheduler, 40)
    for step in (0, 1, 1, 17, 39, 4, 23):  # a restore takes the run back
        follows.follow(step * 100, 4000)
        assert values() == expected[step]
        assert scheduler.get_last_lr() == [rate for rate, _ in expected[step]]
        if step < 39:  # the trainer steps the scheduler, too
            optimizer.step()
            scheduler.step()
    follows.follow(9000, 4000)
    assert values() == expected[40]
    assert not said


@pytest.mark.parametrize("kind", STEPPED)
def test_a_scheduler_of_a_trainers_checkpoint_follows_from_before_its_own_steps(kind):
    expected = own_values(kind)
    first, saved, _ = made_with_two_groups(kind)
    for _ in range(20):
        first.step()
        saved.step()
    optimizer, scheduler, values = made_with_two_groups(kind)
    optimizer.load_state_dict(first.state_dict())
    scheduler.load_state_dict(saved.state_dict())
    follows = RunSchedule(scheduler, 40)
    for step in (7, 30):
        follows.follow(step * 100, 4000)
        assert values() == expected[step]


def test_a_stepped_rate_may_be_a_tensor():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], torch.tensor(1.0), momentum=0.9)
    rate = optimizer.param_groups[0]["lr"]
    follows = RunSchedule(warm_up_and_cosine(optimizer), 40)
    for step, expected in ((24, 0.5), (8, 1.0), (24, 0.5)):
        follows.follow(step * 100, 4000)
        assert rate.item() == pytest.approx(expected)
    assert optimizer.param_groups[0]["lr"] is rate


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


def test_a_scheduler_that_depends_on_a_metric_is_left_alone_with_one_warning(said):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 1.0)
    follows = RunSchedule(lr_scheduler.ReduceLROnPlateau(optimizer), 40)
    for _ in range(3):
        follows.follow(1000, 4000)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert [each["scheduler"] for each in said] == ["ReduceLROnPlateau"]
