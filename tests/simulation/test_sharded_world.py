"""The short form of the simulation of several shards: seeds that must pass, and defects that it must find."""

from __future__ import annotations

import pytest

from tests.simulation.find_defects import find_again, known
from tests.simulation.run import Found, Kind, run
from tests.simulation.sharded_defects import SHARDED_DEFECTS
from tests.simulation.sharded_world import simulate_sharded

SEEDS = 12


@pytest.fixture(scope="module")
def first_seeds() -> Found:
    return run(list(range(SEEDS)), Kind(sharded=True))


def test_the_first_seeds_of_several_shards_hold_every_invariant(first_seeds):
    found = first_seeds
    assert not found.bad(), next(iter(found.bad().items()))
    least = {
        "shard crashes": 2 * SEEDS, "registrar crashes": SEEDS, "power failures": SEEDS // 2, "learner crashes": 4,
        "registrars without fragments": 2, "registrars away in the calm": 3, "shards cut off": 3, "evictions": 2,
        "runs paused": 2, "front crashes": 1, "writes lost": 1, "contributions": 10 * SEEDS,
    }  # fmt: skip
    rare = {what: found.counts[what] for what in least if found.counts[what] < least[what]}
    assert not rare, "these situations are too rare in the seeds"


def test_some_seeds_have_every_situation_of_checkpoints():
    seeds = [9, 27, 38, 82, 88]
    found = run(seeds, Kind(sharded=True))
    assert not found.bad(), next(iter(found.bad().items()))
    least = {
        "checkpoints": 5 * len(seeds), "checkpoints asked for": 2 * len(seeds), "checkpoints that were refused": 3,
        "checkpoints restored": 4, "shards rolled back": 4, "restores that died": 1,
    }  # fmt: skip
    rare = {what: found.counts[what] for what in least if found.counts[what] < least[what]}
    assert not rare, "these situations are too rare in the seeds"


FOUND_A_FAULT = 7100000216, 7100000291, 8100000388, 8400000024, 9700002033, 9900000382, 11400000141


@pytest.mark.parametrize("seed", FOUND_A_FAULT)
def test_seeds_that_once_found_a_fault_hold_every_invariant(seed):
    """Each seed found one of these faults:

    7100000216, 7100000291: a restarted registrar forgot the shards of a run that had not begun.
    8100000388: a contribution before a restarted core's first round gave its learner an answer time since 1970.
    8400000024: the end of a data-unit lease took units that the training loop was about to use.
    9700002033: shards forgot a lease's units before the registrar's decision was durable, and the registrar crashed.
    9900000382: a learner came back before its shard began, and before the shard heard that its eviction was undone.
    11400000141: after a restore, a learner fetched an undone version from a shard that had not rolled back yet.
    """
    simulate_sharded(seed)


def test_each_deliberate_defect_has_a_seed():
    assert known().keys() >= SHARDED_DEFECTS.keys()


@pytest.mark.ci
@pytest.mark.parametrize("name", SHARDED_DEFECTS)
def test_a_deliberate_defect_is_found(name):
    assert find_again(name, 0, 60)
