"""Each contribution names exactly the units whose last sample was trained in its steps."""

from __future__ import annotations

import random

import pytest
from atoll.data.unit_log import UnitLog
from hypothesis import given, settings
from hypothesis import strategies as st


def test_a_unit_belongs_to_the_step_after_its_last_sample_was_handed_out():
    log = UnitLog()
    lease = log.open(7, lag=0)
    log.stepped(1)
    lease.handed = 2
    log.stepped(2)
    lease.handed = 3
    log.stepped(3)
    assert log.ranges(0, 1) == ((7, 0, 0),)
    assert log.ranges(0, 2) == ((7, 0, 2),)
    assert log.ranges(2, 3) == ((7, 2, 3),)
    assert lease.finished == 3


@pytest.mark.parametrize("lag", [1, 2])
def test_a_loader_that_prefetches_assigns_units_to_later_steps(lag):
    log = UnitLog()
    lease = log.open(7, lag)
    lease.handed = 1
    for step in range(1, 1 + lag):
        log.stepped(step)
        assert lease.finished == 0
    log.stepped(1 + lag)
    assert log.ranges(lag, 1 + lag) == ((7, 0, 1),)


def test_an_ended_lease_is_forgotten_after_the_last_contribution_that_may_contain_its_units():
    log = UnitLog()
    log.open(7, lag=0).handed = 1
    log.stepped(4)
    log.close(7)
    log.open(8, lag=0)
    log.forget(3)
    assert log.ranges(3, 4) == ((7, 0, 1), (8, 0, 0))
    log.forget(4)
    assert log.ranges(4, 5) == ((8, 0, 0),)


def test_a_learner_without_units_names_none():
    log = UnitLog()
    log.stepped(1)
    assert log.ranges(0, 1) == ()


@given(st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_contributions_of_adjacent_steps_contain_each_unit_once(seed):
    rng, log = random.Random(seed), UnitLog()
    lease, taken, found = log.open(1, lag=rng.randint(0, 2)), 0, list[int]()
    for step in range(1, 60):
        lease.handed += rng.randint(0, 3)
        log.stepped(step)
        if rng.random() < 0.3:
            ((_, after, upto),) = log.ranges(taken, step)
            found += range(after + 1, upto + 1)
            taken = step
            if rng.random() < 0.5:
                log.forget(taken)
    assert found == list(range(1, len(found) + 1))
    assert len(found) == log.ranges(0, taken)[0][2]
