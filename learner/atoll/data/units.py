"""Datasets for PyTorch's loaders, whose samples come from units that the core leases to this learner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from atoll_wire import outer_pb2 as pb
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from atoll.data.leased_units import LeasedUnit, LeasedUnits
from atoll.data.sources import Source
from atoll.errors import LearnerError

IN_A_WORKER = (
    "worker processes of a DataLoader cannot lease units: use num_workers=0, or `units.loader(batch_size, "
    "num_workers=...)`, whose workers only read"
)


class Units(IterableDataset[Any]):
    """The samples of a dataset's units that this learner leases. Only `Learner.units` creates it.

    A sample counts as trained after the next `Learner.step`. The `for` loop ends when no unit can be leased. Other
    learners may then still hold units. If such a learner is lost, its units become available again, so `more` waits for
    them. A loader must not drop the last batch (`drop_last=True`) and must not run in a worker process: use `loader`
    for worker processes. `epoch` is the epoch of the last sample, from 0.

    Example:
        ```python
        units = learner.units(source, name="corpus")
        while units.more():
            for batch in DataLoader(units, batch_size=8):
                ...
                learner.step(tokens=batch.numel())
        ```
    """

    def __init__(self, source: Source, leased: LeasedUnits, declared: pb.DatasetDeclaration) -> None:
        super().__init__()
        self._source = source
        self._leased = leased
        self._identity = {
            "name": declared.name,
            "units": declared.units,
            "seed": declared.seed,
            "epochs": declared.epochs,
            "fingerprint": declared.fingerprint.hex(),
        }
        self._unit: LeasedUnit | None = None  # the unit that was begun last
        self._next = 0  # number of this unit's next sample; 0 if all its samples have places
        self._taken_back: deque[Place] = deque()  # places that a loader took and did not deliver
        self.epoch = 0

    def more(self) -> bool:
        """Waits until the loop can get samples. Returns False when every unit of all epochs is finished.

        Call it between `for` loops, after the last `Learner.step`: all samples so far then count as trained.

        Raises:
            LearnerError: If the learner cannot continue.
        """
        return bool(self._next or self._taken_back) or self._leased.wait()

    def __iter__(self) -> Iterator[Any]:
        """Yields samples until no unit can be leased. Raises LearnerError if the learner cannot continue."""
        if get_worker_info() is not None:
            raise LearnerError(IN_A_WORKER)
        for place in self._places():
            self._hand_over(place)
            yield self._source.sample(place.leased.unit, place.number)

    def loader(
        self,
        batch_size: int,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,  # noqa: ANN401 - of DataLoader
    ) -> UnitLoader:
        """Returns a loader of batches, whose worker processes read the samples in advance.

        Args:
            batch_size: The number of samples in a batch. The last batch may have fewer.
            num_workers: The number of worker processes; 0 reads in the training process.
            collate_fn: A function that makes a batch from a list of samples. By default, torch's.
            options: Further arguments of torch's DataLoader, such as `pin_memory` and `prefetch_factor`.

        Example:
            ```python
            loader = units.loader(batch_size=8, num_workers=2)
            while units.more():
                for batch in loader:
                    ...
                    learner.step(tokens=batch.numel())
            ```
        """
        options |= {"num_workers": num_workers, "collate_fn": collate_fn}
        return UnitLoader(self, self._source, batch_size, options)

    # ------------------------------------------------------------------------------ for loaders with a state

    def state_dict(self) -> dict[str, Any]:
        """Returns the dataset's identity. The state has no position, since the core knows which units are consumed."""
        return dict(self._identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that a saved state belongs to this dataset.

        Args:
            state: The saved state.

        Raises:
            LearnerError: If the state belongs to another dataset.
        """
        if dict(state) != self._identity:
            raise LearnerError(
                f"the saved state is of dataset {dict(state)}, but this one is {self._identity}: use the same data, "
                "name, seed and epochs"
            )

    def __getstate__(self) -> NoReturn:
        raise LearnerError(IN_A_WORKER)

    # ------------------------------------------------------------------------------ samples in order

    def _places(self) -> Iterator[Place]:
        """Yields the places of the next samples, until no unit can be leased."""
        while self._taken_back or self._next or self._begin():
            if self._taken_back:
                yield self._taken_back.popleft()
                continue
            assert self._unit is not None, "a unit was begun"
            number = self._next
            last = number + 1 >= self._source.samples(self._unit.unit)
            self._next = 0 if last else number + 1
            yield Place(self._unit, number, last)

    def _begin(self) -> bool:
        """Begins the next unit. Returns False if there is none now.

        Does not wait for other learners' units, because those learners may wait for units in this learner's incomplete
        batch.
        """
        leased = self._leased.next()
        if leased is not None:
            self._unit = leased
        return leased is not None

    def _hand_over(self, place: Place) -> None:
        """Records that the training loop gets a sample."""
        self.epoch = place.leased.epoch
        if place.last:
            place.leased.log.handed = place.leased.ordinal

    def _put_back(self, places: Iterable[Place]) -> None:
        """Takes back places that a loader took and did not deliver, in order. They come next."""
        self._taken_back.extendleft(reversed(list(places)))


def check_single(ranks: int) -> None:
    """Raises LearnerError for a learner with several ranks, which would all have to train on the same units."""
    if ranks > 1:
        raise LearnerError(
            f"this learner has {ranks} ranks, and only a single-process learner can lease units: start one learner per "
            "process, or divide the data yourself"
        )


def declaration(source: Source, name: str, seed: int, epochs: int) -> pb.DatasetDeclaration:
    """Returns the declaration of a dataset, as learners send it. Raises LearnerError for arguments that are out of
    range."""
    if not 0 <= seed < 1 << 64 or not 0 < epochs < 1 << 32:
        raise LearnerError(
            f"units() got seed={seed} and epochs={epochs}: pass a seed from 0 to 2**64 - 1, and 1 to 2**32 - 1 epochs"
        )
    return pb.DatasetDeclaration(
        name=name,
        units=source.units,
        tokens=source.unit_tokens,
        seed=seed,
        epochs=epochs,
        fingerprint=source.fingerprint,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """One sample of a leased unit. last: whether it is the unit's last sample."""

    leased: LeasedUnit
    number: int
    last: bool


class UnitLoader:
    """A loader of batches from leased units. Only `Units.loader` creates it, and its method has an example.

    The training process leases units and decides which samples are in a batch. Worker processes only read.
    """

    def __init__(self, units: Units, source: Source, batch_size: int, options: Mapping[str, Any]) -> None:
        self._units = units
        self._source = source
        self._batch_size = batch_size
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        """Yields batches until no unit can be leased. Raises LearnerError if the learner cannot continue."""
        taken: deque[Place] = deque()  # places that the loader took and has not delivered, in order
        sizes: deque[int] = deque()  # number of places in each batch of `taken`
        indices = self._batches(taken, sizes)
        loader: DataLoader[Any] = DataLoader(
            _Samples(self._source),
            batch_sampler=cast("Sampler[list[Any]]", indices),  # torch only iterates over it
            **self._options,
        )
        try:
            for batch in loader:
                for _ in range(sizes.popleft()):
                    self._units._hand_over(taken.popleft())
                yield batch
        finally:
            self._units._put_back(taken)

    def _batches(self, taken: deque[Place], sizes: deque[int]) -> Iterator[list[tuple[int, int]]]:
        batch: list[tuple[int, int]] = []
        for place in self._units._places():
            taken.append(place)
            batch.append((place.leased.unit, place.number))
            if len(batch) == self._batch_size:
                sizes.append(len(batch))
                yield batch
                batch = []
        if batch:
            sizes.append(len(batch))
            yield batch


class _Samples(Dataset[Any]):
    """Reads samples by unit and number, also in worker processes."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, place: tuple[int, int]) -> Any:  # noqa: ANN401 - a sample
        return self._source.sample(*place)
