"""Leased units in data loaders of other libraries, with the real libraries."""

from __future__ import annotations

import pytest
from atoll.data import Rows
from torch.utils.data import DataLoader

from tests.learner.test_units import Loop, Registrar, rows_of

pytestmark = pytest.mark.frameworks


def test_a_stateful_loader_resumes_with_newly_leased_units():
    from torchdata.stateful_dataloader import StatefulDataLoader

    loop = Loop(Registrar([3, 0, 1, 2]))
    loader = StatefulDataLoader(loop.units, batch_size=3)
    loop.step(next(iter(loader)))
    resumed = Loop(Registrar([5, 6, 7]))
    after = StatefulDataLoader(resumed.units, batch_size=3)
    after.load_state_dict(loader.state_dict())
    while resumed.units.more():
        for batch in after:
            resumed.step(batch)
    assert resumed.samples() == rows_of([5, 6, 7])


def test_units_of_a_hugging_face_dataset():
    import datasets

    source = Rows(datasets.Dataset.from_dict({"x": list(range(10))}), unit=3)
    rows = [source.sample(unit, n)["x"] for unit in range(source.units) for n in range(source.samples(unit))]
    assert rows == list(range(10))


@pytest.mark.parametrize(("lag", "too_early"), [(0, True), (1, False)])
def test_accelerate_is_one_batch_ahead(lag, too_early):
    from accelerate import Accelerator

    loop, early = Loop(Registrar([0, 1, 2, 3, 4, 5]), lag), 0
    loader = Accelerator(cpu=True).prepare(DataLoader(loop.units, batch_size=2))
    while loop.units.more():
        for batch in loader:
            loop.step(batch)
            early += 2 * loop.log.ranges(0, loop.steps)[0][2] > len(loop.samples())
    assert bool(early) is too_early
    assert loop.log.ranges(0, loop.steps) == ((5, 0, 6),)
    assert loop.samples() == rows_of([0, 1, 2, 3, 4, 5])
