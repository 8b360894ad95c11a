"""Atoll for training loops with Hugging Face's Accelerate: a learner for a prepared model and its optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from atoll.data.sources import Source
from atoll.data.units import Units
from atoll.errors import LearnerError
from atoll.integrations.batch_tokens import CountTokens
from atoll.integrations.loop_session import LoopSession, run_metrics
from atoll.learner import Learner

__all__ = ["AcceleratedLearner"]

LAG = 1  # Accelerate's loaders fetch one batch in advance
OUTSIDE = "units() needs a learner that has joined: call it in the `with` block, and prepare its loader there"
SCHEDULE = (
    "AcceleratedLearner got only one of scheduler= and schedule_steps=: pass the prepared scheduler and its number of "
    "steps, or neither"
)


class AcceleratedLearner:
    """Turns an Accelerate loop into a learner of a run. The `with` block joins at its start and leaves at its end.

    Call `step` after each micro-batch. It counts the tokens, and exchanges fragments if Accelerate synchronised the
    gradients. Enter the block after `accelerator.load_state()`. The optimizer then continues from that checkpoint, and
    the parameters come from the run.

    Args:
        accelerator: The loop's Accelerator.
        model: The model, as `prepare` returned it.
        optimizer: The optimizer, as `prepare` returned it, or a list of all optimizers.
        server: HOST:PORT of a core or front, or several addresses, which are tried in turn.
        name: The learner's name, unique in the run. Default: REGION.HOSTNAME.
        scheduler: A scheduler that follows the run's tokens, as `prepare` returned it. Needs `schedule_steps`.
        schedule_steps: The scheduler's number of steps.
        tokens: A function that returns the number of tokens in a batch. Default: see
            `atoll.integrations.batch_tokens.count_tokens`.
        options: Further arguments of `atoll.Learner`, such as `tls`.

    Raises:
        LearnerError: If only one of `scheduler` and `schedule_steps` is given, or the learner cannot join or continue.

    Example:
        ```python
        from atoll.integrations.accelerate import AcceleratedLearner

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with AcceleratedLearner(accelerator, model, optimizer, server="127.0.0.1:7070", name="eu-west") as learner:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if learner.step(batch):
                    break  # the run has reached its token target
        ```
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        server: str | Sequence[str],
        name: str = "",
        *,
        scheduler: object = None,
        schedule_steps: int | None = None,
        tokens: CountTokens | None = None,
        **options: Any,  # noqa: ANN401 - arguments of Learner
    ) -> None:
        if (scheduler is None) != (schedule_steps is None):
            raise LearnerError(SCHEDULE)
        self._accelerator = accelerator
        self._model = model
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._schedulers = [] if scheduler is None else [scheduler]
        self._schedule_steps = schedule_steps or float("inf")
        self._session = LoopSession({"server": server, "name": name, **options}, tokens, schedule=bool(schedule_steps))

    @property
    def learner(self) -> Learner | None:
        """The learner. None before `start`."""
        return self._session.learner

    def __enter__(self) -> AcceleratedLearner:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def start(self) -> AcceleratedLearner:
        """Joins the run. Entering the `with` block calls this method.

        Returns:
            This object.

        Raises:
            LearnerError: If the learner cannot join.
        """
        model = self._accelerator.unwrap_model(self._model)
        schedulers = [(each, self._schedule_steps) for each in self._schedulers]
        self._session.begin(model, self._optimizers, schedulers)
        return self

    def close(self, *, drain: bool = True) -> None:
        """Leaves the run. Repeated calls are allowed.

        Args:
            drain: Whether to send outstanding work first.
        """
        self._session.end(drain=drain)

    def units(self, source: Source, name: str, *, seed: int = 0, epochs: int = 1) -> Units:
        """Returns the samples of the data units that the core leases to this learner. Call this inside the block.

        Args:
            source: The data, such as `atoll.data.Rows`.
            name: The dataset's name. All learners need the same source, seed and epochs for it.
            seed: Decides the order of units, which differs between epochs.
            epochs: Number of times that the run trains on each unit.

        Raises:
            LearnerError: If the learner has not joined, has several ranks, or already uses a dataset of this name.

        Example:
            ```python
            units = learner.units(atoll.data.Rows(rows, unit=64), "text")
            loader = accelerator.prepare(DataLoader(units, batch_size=16))
            ```
        """
        if self.learner is None or not self._session.is_training:
            raise LearnerError(OUTSIDE)
        return self.learner.units(source, name, seed=seed, epochs=epochs, lag=LAG)

    def step(self, batch: object, loss: float | None = None) -> bool:
        """Counts a micro-batch's tokens, and exchanges fragments if the micro-batch ended an optimizer step.

        Args:
            batch: The micro-batch.
            loss: The training loss, shown in status and metrics.

        Returns:
            Whether the run has reached its token target.

        Raises:
            LearnerError: If the tokens cannot be counted, or the learner cannot continue.

        Example:
            ```python
            if learner.step(batch):
                break
            ```
        """
        self._session.count(batch)
        return self._session.step(loss) if self._accelerator.sync_gradients else False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager for evaluation and `save_state`. The time in its block does not count as lost.

        Example:
            ```python
            with learner.pause():
                accelerator.save_state("state")
            ```
        """
        self._session.rest()
        try:
            yield
        finally:
            self._session.resume()

    def metrics(self) -> dict[str, float]:
        """Returns figures of the run, by name, such as `atoll/run_tokens`. Empty before `start`.

        Example:
            ```python
            accelerator.log({"loss": loss.item(), **learner.metrics()}, step=step)
            ```
        """
        return run_metrics(self._session.learner) if self._session.learner is not None else {}
