"""The learner inside a trainer's loop. A trainer's callback calls a session at the trainer's events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import nn

from atoll.data.sources import Source
from atoll.errors import LearnerError
from atoll.integrations.batch_tokens import CountTokens, TokenCounter
from atoll.integrations.run_schedule import RunSchedule
from atoll.integrations.trainer_units import TrainerUnits
from atoll.learner import Learner

log = structlog.get_logger()

METRICS = ("run_tokens", "merged", "pending", "connected", "blocked_s")  # fields of Stats that trainers log
EARLY = (
    "the training loop ended before the run's token target: the run needs other learners to reach it, or a restart of "
    "this one with a higher limit (such as max_steps)"
)
ONE_DATASET = "this callback already has a dataset of leased units: reuse the result of units()"


def run_metrics(learner: Learner) -> dict[str, float]:
    """Returns figures of the run for a trainer's log, by name ("atoll/run_tokens")."""
    stats = learner.stats()
    return {f"atoll/{name}": float(getattr(stats, name)) for name in METRICS}


class LoopSession:
    """Starts a learner when training begins and closes it when training ends.

    learner: the current or last learner; None before training begins. options: arguments of `atoll.Learner`.
    tokens: counts the tokens of a batch. schedule: whether schedulers follow the run's tokens.
    """

    def __init__(self, options: Mapping[str, Any], tokens: CountTokens | None, *, schedule: bool) -> None:
        self.learner: Learner | None = None
        self._options = dict(options)
        self._tokens = TokenCounter(tokens)
        self._follows = schedule
        self._schedules: list[RunSchedule] = []
        self._training = False
        self._pause: contextlib.ExitStack | None = None
        self._units: TrainerUnits | None = None

    @property
    def has_units(self) -> bool:
        """Whether the learner leases units."""
        return self._units is not None

    @property
    def is_training(self) -> bool:
        """Whether the learner is in the run."""
        return self._training

    def units(self, source: Source, name: str, seed: int, epochs: int, join: Callable[[], None]) -> TrainerUnits:
        """Returns a dataset whose units the learner leases. Raises LearnerError at the second call.

        join: joins the run if the learner is not in it. The dataset calls it before it reads the first sample.
        """
        if self._units is not None:
            raise LearnerError(ONE_DATASET)
        self._units = TrainerUnits(source, name, seed, epochs, join)
        return self._units

    def more(self) -> bool:
        """Waits until leased units have samples for another pass. Returns False if all units are finished.

        Call it after the last step of a pass.
        """
        return self._units is None or not self._training or self._units.more()

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[tuple[object, float]],
    ) -> None:
        """Joins the run. schedulers: each with its number of steps. Raises LearnerError if the learner cannot join."""
        self.end(drain=False)
        self._tokens.take()  # drops the tokens of a step that an error interrupted
        learner = self.learner = Learner(model, list(optimizers), **self._options)
        self._schedules = [RunSchedule(*each) for each in schedulers] if self._follows else []
        learner.start()
        self._training = True
        if self._units is not None:
            self._units.begin(learner)
        self._follow(learner)

    def count(self, batch: object) -> None:
        """Counts the tokens of a micro-batch. Does nothing while the learner is not in the run."""
        if self._training:
            self._tokens.add(batch)

    def step(self, loss: float | None = None) -> bool:
        """Ends an optimizer step. Returns whether the run has reached its token target."""
        learner = self.learner
        if learner is None or not self._training:
            return False
        self.resume()
        learner.step(self._tokens.take(), loss)
        self._follow(learner)
        return 0 < learner.total_tokens <= learner.run_tokens

    def _follow(self, learner: Learner) -> None:
        for schedule in self._schedules:
            schedule.follow(learner.run_tokens, learner.total_tokens)

    def rest(self) -> None:
        """Begins a pause, such as an evaluation. Repeated calls are allowed."""
        if self._training and self.learner is not None and self._pause is None:
            self._pause = contextlib.ExitStack()
            self._pause.enter_context(self.learner.pause())

    def resume(self) -> None:
        """Ends the pause, if any."""
        if self._pause is not None:
            self._pause.close()
            self._pause = None

    def end(self, *, drain: bool) -> None:
        """Leaves the run. drain: whether to send outstanding work first. Repeated calls are allowed."""
        if self.learner is not None and self._training:
            self._training = False
            self.resume()
            run_tokens, total_tokens = self.learner.run_tokens, self.learner.total_tokens
            if drain and run_tokens < total_tokens:
                log.warning(EARLY, run_tokens=run_tokens, total_tokens=total_tokens)
            self.learner.close(drain=drain)
