"""Sets a torch scheduler's learning rates by the run's tokens instead of this process's own steps.

All learners of a run then have the same learning rate, and a restarted learner continues the schedule.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any, TypeGuard

import structlog
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

log = structlog.get_logger()

UNKNOWN = (
    "this scheduler's learning rates follow the process's own steps, because they depend on a metric: use another "
    "scheduler, or pass schedule=False (with Accelerate: omit scheduler=)"
)
SCHEDULED = ("lr", "momentum", "betas")  # values of an optimizer's parameter groups that schedulers set


class RunSchedule:
    """A scheduler that follows the run's tokens. steps: the schedule's number of steps."""

    def __init__(self, scheduler: Any, steps: float) -> None:  # noqa: ANN401 - Accelerate wraps schedulers
        self._scheduler = scheduler if hasattr(scheduler, "optimizer") else getattr(scheduler, "scheduler", scheduler)
        self._steps = steps
        self._replay: Replay | None = None
        self._warned = False

    def follow(self, run_tokens: int, total_tokens: int) -> None:
        """Sets the learning rates for the run's current tokens. Does nothing if the run has no token target.

        If the scheduler depends on a metric, it only logs one warning.
        """
        if not total_tokens or not math.isfinite(self._steps):
            return
        scheduler, step = self._scheduler, math.ceil(min(1.0, run_tokens / total_tokens) * self._steps)
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = step
            rates = [base * at(step) for base, at in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
            found = [{"lr": rate} for rate in rates]
        elif hasattr(scheduler, "_get_closed_form_lr"):
            scheduler.last_epoch = step
            found = [{"lr": rate} for rate in scheduler._get_closed_form_lr()]
        elif _needs_no_metric(scheduler):
            self._replay = self._replay or Replay(scheduler)
            found = self._replay.at(step)
        else:
            if not self._warned:
                log.warning(UNKNOWN, scheduler=type(scheduler).__name__)
            self._warned = True
            return
        for group, values in zip(scheduler.optimizer.param_groups, found, strict=True):
            for name, value in values.items():
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
        scheduler._last_lr = [float(values["lr"]) for values in found]


class Replay:
    """Finds a scheduler's values for a step by stepping a copy of the scheduler, whose optimizer has no parameters."""

    def __init__(self, scheduler: LRScheduler) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        optimizer.param_groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"} | {"params": []}
            for group in scheduler.optimizer.param_groups
        ]
        self._groups = optimizer.param_groups
        self._scheduler = copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
        self._step = 0
        self._rewind(self._scheduler)

    def at(self, step: int) -> list[dict[str, Any]]:
        """Returns the values of each parameter group for a step, from 0. A step before the last one starts over."""
        if step < self._step:
            self._step = 0
            self._rewind(self._scheduler)
        while self._step < step:
            self._scheduler.step()
            self._step += 1
        return [{name: group[name] for name in SCHEDULED if name in group} for group in self._groups]

    def _rewind(self, scheduler: LRScheduler, *, resets: bool = True) -> None:
        """Takes a scheduler to its step 0, as constructors do. resets: whether from the groups' initial rates."""
        for group in self._groups if resets else []:
            group["lr"] = copy.deepcopy(group["initial_lr"])
        parts = list(getattr(scheduler, "_schedulers", []))
        if isinstance(scheduler, SequentialLR):
            for part in reversed(parts):  # step 0 has the first part's rates
                self._rewind(part)
            for part in parts[1:]:
                part.last_epoch = -1  # not begun
            scheduler.last_epoch = 0
            return
        for part in parts:  # of a ChainedScheduler, whose parts all change the rates
            self._rewind(part, resets=False)
        if not parts:
            scheduler.last_epoch = -1
            scheduler._initial_step()
            scheduler._step_count = 2  # otherwise torch warns, because the copy's optimizer takes no steps


def _needs_no_metric(scheduler: object) -> TypeGuard[LRScheduler]:
    """Returns whether a scheduler can step without arguments."""
    if not isinstance(scheduler, LRScheduler):
        return False
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError:  # an argument is missing
        return False
    return True
