"""Sets a torch scheduler's learning rates by the run's tokens instead of this process's own steps.

All learners of a run then have the same learning rate, and a restarted learner continues the schedule.
"""

from __future__ import annotations

import math
from typing import Any

import structlog
import torch
from torch.optim.lr_scheduler import LambdaLR

log = structlog.get_logger()

UNKNOWN = (
    "this scheduler's learning rates follow the process's own steps, because they cannot be computed for a given step: "
    "use a LambdaLR, or pass schedule=False (with Accelerate: omit scheduler=)"
)


class RunSchedule:
    """A scheduler that follows the run's tokens. steps: the schedule's number of steps."""

    def __init__(self, scheduler: Any, steps: float) -> None:  # noqa: ANN401 - Accelerate wraps schedulers
        self._scheduler = scheduler if hasattr(scheduler, "base_lrs") else getattr(scheduler, "scheduler", scheduler)
        self._steps = steps
        self._warned = False

    def follow(self, run_tokens: int, total_tokens: int) -> None:
        """Sets the learning rates for the run's current tokens. Does nothing if the run has no token target.

        If the learning rates cannot be computed for a given step, it only logs one warning.
        """
        if not total_tokens or not math.isfinite(self._steps):
            return
        scheduler, step = self._scheduler, math.ceil(min(1.0, run_tokens / total_tokens) * self._steps)
        if isinstance(scheduler, LambdaLR):
            scheduler.last_epoch = step
            rates = [base * at(step) for base, at in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
        elif hasattr(scheduler, "_get_closed_form_lr"):
            scheduler.last_epoch = step
            rates = scheduler._get_closed_form_lr()
        else:
            if not self._warned:
                log.warning(UNKNOWN, scheduler=type(scheduler).__name__)
            self._warned = True
            return
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        scheduler._last_lr = [float(rate) for rate in rates]
