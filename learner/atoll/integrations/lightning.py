"""Atoll for Lightning: one callback. Lightning still controls data, precision, checkpoints and logs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig

from atoll.data.sources import Source
from atoll.integrations.batch_tokens import CountTokens
from atoll.integrations.loop_session import LoopSession, run_metrics
from atoll.integrations.trainer_units import TrainerUnits
from atoll.learner import Learner

__all__ = ["AtollCallback"]


class AtollCallback(Callback):
    """Turns a Lightning Trainer into a learner of a run. The learner joins when fitting begins and leaves when it ends.

    - Tokens are counted in all batches of all ranks. All of the Trainer's optimizers belong to the learner.
    - If the run has a token target, schedulers follow the run's tokens, and training stops at the target.
      `max_steps` or `max_epochs` then sets the length of the schedule and the maximum steps of this process.
    - Validation does not count as lost time. After an error or Ctrl-C in `fit()`, the learner leaves.
    - Lightning's loggers receive figures of the run, such as `atoll/run_tokens`.
    - After `fit(ckpt_path=...)`, the optimizer continues from Lightning's checkpoint. The parameters come from the run
      and not from the checkpoint.

    Args:
        server: HOST:PORT of a core or front, or several addresses, which are tried in turn.
        name: The learner's name, unique in the run. Default: REGION.HOSTNAME.
        module: The name of the submodule to share, such as "net". Learners with other trainers can then join the run.
            Optimizers must update only the submodule's parameters. Default: the whole LightningModule.
        tokens: A function that returns the number of tokens in a batch. Default: see
            `atoll.integrations.batch_tokens.count_tokens`.
        schedule: Whether schedulers follow the run's tokens.
        options: Further arguments of `atoll.Learner`, such as `tls`.

    Raises:
        LearnerError: `fit()` raises it if the learner cannot join or continue.

    Example:
        ```python
        from atoll.integrations.lightning import AtollCallback

        callback = AtollCallback(server="127.0.0.1:7070", name="eu-west")
        lightning.Trainer(max_steps=1000, callbacks=[callback]).fit(module, loader)
        ```
    """

    def __init__(
        self,
        server: str | Sequence[str],
        name: str = "",
        *,
        module: str = "",
        tokens: CountTokens | None = None,
        schedule: bool = True,
        **options: Any,  # noqa: ANN401 - arguments of Learner
    ) -> None:
        self._session = LoopSession({"server": server, "name": name, **options}, tokens, schedule=schedule)
        self._module = module
        self._fitting: tuple[Trainer, LightningModule] | None = None
        self._steps = 0  # number of the Trainer's optimizer steps at the end of the last batch

    @property
    def learner(self) -> Learner | None:
        """The current or last learner. None before `fit()`."""
        return self._session.learner

    def units(self, source: Source, name: str, *, seed: int = 0, epochs: int = 1) -> TrainerUnits:
        """Returns a dataset of the data units that the core leases to this learner, for the trainer's data loader.

        In each epoch of the run, each unit is consumed once, whichever learner trains on it (see `atoll.data`). The
        Trainer begins a new epoch whenever no unit can be leased for now. Training ends when every unit is finished, or
        after `max_steps`, which should be larger. The learner joins when Lightning reads the first batch.

        Args:
            source: The data, such as `atoll.data.Rows` or `atoll.data.TokenFile`.
            name: The dataset's name. All learners need the same source, seed and epochs for it.
            seed: Decides the order of units, which differs between epochs.
            epochs: Number of times that the run trains on each unit.

        Returns:
            An iterable dataset without a length, for a data loader without worker processes.

        Raises:
            LearnerError: At the second call. Training raises it if the learner has several ranks.

        Example:
            ```python
            data = callback.units(atoll.data.Rows(rows, unit=64), "text")
            trainer = lightning.Trainer(max_steps=1000, callbacks=[callback])
            trainer.fit(module, DataLoader(data, batch_size=8))
            ```
        """
        return self._session.units(source, name, seed, epochs, self._join)

    def close(self, *, drain: bool = True) -> None:
        """Leaves the run. Repeated calls are allowed.

        Args:
            drain: Whether to send outstanding work first.
        """
        self._session.end(drain=drain)

    # ------------------------------------------------------------------------------ Lightning's events

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remembers what to join with."""
        self.close(drain=False)
        self._fitting = trainer, pl_module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Joins the run. Lightning has already restored its checkpoint."""
        del trainer, pl_module
        self._join()

    def _join(self) -> None:
        """Joins the run, unless Lightning has already read leased units. It reads the first batch before this event."""
        if self._fitting is None or self._session.is_training:
            return
        trainer, pl_module = self._fitting
        self._steps = trainer.global_step
        schedulers = [(each.scheduler, _steps_of(each, trainer)) for each in trainer.lr_scheduler_configs]
        self._session.begin(pl_module.get_submodule(self._module), trainer.optimizers, schedulers)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401 - a tensor, a mapping or None
        batch: Any,  # noqa: ANN401 - of any data loader
        batch_idx: int,
    ) -> None:
        """Counts the batch's tokens, and exchanges fragments if the batch ended an optimizer step."""
        del batch_idx
        learner = self._session.learner
        if learner is None or not self._session.is_training:
            return
        self._session.count(batch)
        if trainer.global_step == self._steps:
            return  # a micro-batch of a larger step
        self._steps = trainer.global_step
        is_logged = self._steps % trainer.log_every_n_steps == 0
        if self._session.step(_loss(outputs) if is_logged else None):
            trainer.should_stop = True
        if is_logged:
            pl_module.log_dict(run_metrics(learner), batch_size=1)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins a pause."""
        del trainer, pl_module
        self._session.rest()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the pause."""
        del trainer, pl_module
        self._session.resume()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends training if the leased units end."""
        del pl_module
        is_last = trainer.should_stop or trainer.global_step == trainer.max_steps
        if not is_last and not self._session.more():
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the run."""
        del trainer, pl_module
        self._fitting = None
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves the run without sending outstanding work."""
        del trainer, pl_module, exception
        self._fitting = None
        self.close(drain=False)


def _loss(outputs: Any) -> float | None:  # noqa: ANN401 - as in the event
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return float(loss) if loss is not None else None


def _steps_of(config: LRSchedulerConfig, trainer: Trainer) -> float:
    """Returns how often Lightning steps a scheduler, per optimizer step or per epoch, in a training of full length."""
    steps: float = trainer.estimated_stepping_batches
    if config.interval == "epoch":
        steps /= max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))
    return float(steps / config.frequency)
