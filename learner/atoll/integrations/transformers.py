"""Atoll for Hugging Face's Trainer: one callback.

The Trainer still controls data, precision, checkpoints and logs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from atoll.data.sources import Source
from atoll.errors import LearnerError
from atoll.integrations.batch_tokens import CountTokens
from atoll.integrations.loop_session import LoopSession, run_metrics
from atoll.integrations.trainer_units import TrainerUnits
from atoll.learner import Learner

__all__ = ["AtollCallback"]

ACCUMULATED = (
    "leased units with gradient_accumulation_steps={}: the Trainer takes no step for the last micro-batches of a pass; "
    "use gradient_accumulation_steps=1"
)


class AtollCallback(TrainerCallback):
    """Turns a Trainer into a learner of a run. The learner joins when `train()` begins and leaves when it ends.

    - Tokens are counted in all micro-batches of all ranks.
    - If the run has a token target, the Trainer's schedule follows the run's tokens, and training stops at the
      target. `max_steps` then sets the length of the schedule and the maximum steps of this process.
    - Evaluation and saving do not count as lost time. The learner leaves before the Trainer loads its best model. It
      also leaves after an error in `train()`.
    - The Trainer's log contains figures of the run, such as `atoll/run_tokens`.
    - After `train(resume_from_checkpoint=...)`, the optimizer continues from the Trainer's checkpoint. The parameters
      come from the run and not from the checkpoint.

    Pass the callback in `callbacks=[...]`. Otherwise, the learner cannot leave after an error.

    Args:
        server: HOST:PORT of a core or front, or several addresses, which are tried in turn.
        name: The learner's name, unique in the run. Default: REGION.HOSTNAME.
        tokens: A function that returns the number of tokens in a batch, which is a mapping of the model's inputs.
            Default: the attention mask, else the labels except -100, else the input IDs.
        schedule: Whether the schedule follows the run's tokens.
        options: Further arguments of `atoll.Learner`, such as `tls`.

    Raises:
        LearnerError: `train()` raises it if the learner cannot join or continue.

    Example:
        ```python
        from atoll.integrations.transformers import AtollCallback

        callback = AtollCallback(server="127.0.0.1:7070", name="eu-west")
        Trainer(model=model, args=args, train_dataset=data, callbacks=[callback]).train()
        ```
    """

    def __init__(
        self,
        server: str | Sequence[str],
        name: str = "",
        *,
        tokens: CountTokens | None = None,
        schedule: bool = True,
        **options: Any,  # noqa: ANN401 - arguments of Learner
    ) -> None:
        self._session = LoopSession({"server": server, "name": name, **options}, tokens, schedule=schedule)
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._loss: float | None = None

    @property
    def learner(self) -> Learner | None:
        """The current or last learner. None before `train()`."""
        return self._session.learner

    def units(self, source: Source, name: str, *, seed: int = 0, epochs: int = 1) -> TrainerUnits:
        """Returns a dataset of the data units that the core leases to this learner, for the trainer's data loader.

        In each epoch of the run, each unit is consumed once, whichever learner trains on it (see `atoll.data`). The
        Trainer begins a new epoch whenever no unit can be leased for now. Training ends when every unit is finished, or
        after `max_steps`, which should be larger. A resumed Trainer skips no data.

        Args:
            source: The data, such as `atoll.data.Rows` or `atoll.data.TokenFile`.
            name: The dataset's name. All learners need the same source, seed and epochs for it.
            seed: Decides the order of units, which differs between epochs.
            epochs: Number of times that the run trains on each unit.

        Returns:
            An iterable dataset without a length, for a data loader without worker processes.

        Raises:
            LearnerError: At the second call. Training raises it if the learner has several ranks or
                `gradient_accumulation_steps` is above 1.

        Example:
            ```python
            data = callback.units(atoll.data.Rows(rows, unit=64), "text")
            Trainer(model=model, args=args, train_dataset=data, callbacks=[callback]).train()
            ```
        """
        return self._session.units(source, name, seed, epochs, join=lambda: None)

    def close(self, *, drain: bool = True) -> None:
        """Leaves the run. Repeated calls are allowed.

        Args:
            drain: Whether to send outstanding work first.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._session.end(drain=drain)

    # ------------------------------------------------------------------------------ the Trainer's events

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: object
    ) -> None:
        """Makes the learner leave after an error in `train()`, because the Trainer has no event for errors.

        Also makes `train()` read leased units as they come.
        """
        del args, state, control, given
        trainer = _calling(Trainer)
        train = trainer.train

        @functools.wraps(train)
        def leaving(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as Trainer.train
            if self._session.has_units:
                trainer.args.ignore_data_skip = True  # the core knows which units are consumed
                trainer.accelerator.dataloader_config.dispatch_batches = False  # dispatching fails without any unit
            try:
                return train(*arguments, **named)
            except BaseException:
                self.close(drain=False)
                raise

        trainer.train = leaving

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: object = None,
        **given: object,
    ) -> None:
        """Joins the run."""
        del control, given
        self.close(drain=False)
        if self._session.has_units and args.gradient_accumulation_steps > 1:
            raise LearnerError(ACCUMULATED.format(args.gradient_accumulation_steps))
        callbacks = _calling(CallbackHandler).callbacks
        callbacks.insert(1, callbacks.pop(callbacks.index(self)))  # before callbacks that send the log to other tools
        schedulers = [(lr_scheduler, state.max_steps)] if lr_scheduler is not None else []
        self._session.begin(model, [optimizer], schedulers)
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    @torch.compiler.disable
    def _count(self, model: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        """Counts the tokens of a training batch. The model calls it before each forward pass."""
        if model.training and torch.is_grad_enabled():
            self._session.count(named or (arguments[0] if len(arguments) == 1 else arguments))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: object
    ) -> None:
        """Exchanges fragments after an optimizer step."""
        del args, state, given
        loss, self._loss = self._loss, None
        if self._session.step(loss):
            control.should_training_stop = True
        if control.should_evaluate or control.should_save:
            self._session.rest()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: object
    ) -> None:
        """Begins a pause for an evaluation that `control` did not announce."""
        del args, state, control, given
        self._session.rest()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: object) -> None:
        """Leaves the run if early stopping ends the training. The Trainer loads its best model after this event."""
        del args, state, given
        if control.should_training_stop:
            self.close()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: object
    ) -> None:
        """Leaves the run if training ends, as it does when the leased units end.

        Otherwise, begins a pause if an evaluation or a save follows.
        """
        del args, state, given
        control.should_training_stop = control.should_training_stop or not self._session.more()
        if control.should_training_stop:
            self.close()
        elif control.should_evaluate or control.should_save:
            self._session.rest()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: object
    ) -> None:
        """Ends the pause."""
        del args, state, control, given
        self._session.resume()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **given: object,
    ) -> None:
        """Adds figures of the run to the Trainer's log. Leaves the run if training has ended."""
        del args, given
        learner = self._session.learner
        if learner is not None and self._session.is_training:
            self._loss = logs.get("loss", self._loss)
            figures = run_metrics(learner)
            logs.update(figures)
            state.log_history[-1].update(figures)
        if control.should_training_stop:
            self.close()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: object
    ) -> None:
        """Leaves the run."""
        del args, state, control, given
        self.close()


def _calling(kind: type[Any]) -> Any:  # noqa: ANN401 - an object of this type
    """Returns the object of this type on the call stack. The Trainer does not pass itself to callbacks."""
    frame = sys._getframe(1)
    while not isinstance(found := frame.f_locals.get("self"), kind):
        assert frame.f_back is not None, f"a {kind.__name__} calls this event"
        frame = frame.f_back
    return found
