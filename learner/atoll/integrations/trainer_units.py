"""A dataset for a trainer that exists before the learner joins, and whose units the learner leases afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from atoll.data.sources import Source
from atoll.data.units import Units
from atoll.errors import LearnerError
from atoll.learner import Learner

LAG = 1  # steps by which the loaders of the Trainer and of Lightning are ahead: they fetch one batch in advance
IN_A_WORKER = (
    "a data loader's worker process cannot lease units: use num_workers=0 (with Hugging Face's Trainer: "
    "dataloader_num_workers=0)"
)
ABANDONED = (
    "the trainer began a new pass over the leased units before the end of the last pass, so it dropped samples: do not "
    "limit the batches of an epoch (with Lightning: limit_train_batches, overfit_batches)"
)
NOT_TRAINING = (
    "the leased units were read outside training: pass the dataset only to a trainer that has the callback (with "
    "Lightning, also pass max_steps= instead of max_epochs=)"
)


class TrainerUnits(IterableDataset[Any]):
    """The samples of the units that a callback's learner leases. The callbacks' method `units` returns it.

    A pass ends when no unit can be leased. For a trainer, each pass is an epoch. It must read a pass to its end, in the
    training process. join: called before the first sample is read; joins the run if the learner has not joined.
    """

    def __init__(self, source: Source, name: str, seed: int, epochs: int, join: Callable[[], None]) -> None:
        super().__init__()
        self._source = source
        self._name = name
        self._seed = seed
        self._epochs = epochs
        self._join = join
        self._units: Units | None = None
        self._reading = False

    def begin(self, learner: Learner) -> None:
        """Takes the units from a learner that has joined. Raises LearnerError if it cannot lease units."""
        self._units = learner.units(self._source, self._name, seed=self._seed, epochs=self._epochs, lag=LAG)
        self._reading = False

    def __iter__(self) -> Iterator[Any]:
        """Yields samples until no unit can be leased. Raises LearnerError if the learner cannot continue."""
        if get_worker_info() is not None:
            raise LearnerError(IN_A_WORKER)
        self._join()
        if self._units is None:
            raise LearnerError(NOT_TRAINING)
        if self._reading:
            raise LearnerError(ABANDONED)
        self._reading = True
        yield from self._units
        self._reading = False

    def more(self) -> bool:
        """Waits until another pass has samples. Returns False if every unit of all epochs is finished.

        Call it after the last step of a pass. In the middle of a pass, it returns True at once.
        """
        return self._units is None or self._reading or self._units.more()
