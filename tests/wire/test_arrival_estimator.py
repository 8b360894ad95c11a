"""Timeouts that follow observed gaps between arrivals."""

from __future__ import annotations

import random

import pytest
from atoll_wire.connections.arrival_estimator import ArrivalEstimator


def after(gaps, least_s: float = 0.0, most_s: float = 1e9) -> tuple[ArrivalEstimator, float]:
    made, now = ArrivalEstimator(least_s, most_s), 100.0
    made.saw(now)
    for gap in gaps:
        now += gap
        made.saw(now)
    return made, now


def test_an_unknown_timeout_is_the_longest():
    made = ArrivalEstimator(1.0, 60.0)
    assert not made.overdue(1e6)
    made.saw(0.0)
    assert made.max_wait_s() == 60.0
    assert not made.overdue(60.0)
    assert made.overdue(60.1)


def test_regular_arrivals_give_a_short_timeout_and_irregular_ones_a_long_one():
    even, _ = after([1.0] * 50)
    assert even.max_wait_s() == pytest.approx(1.0, rel=0.01)
    rng = random.Random(0)
    uneven, _ = after([rng.expovariate(1.0) for _ in range(500)])
    assert 2.0 < uneven.max_wait_s() < 12.0


def test_a_timeout_stays_within_its_bounds():
    assert after([0.001] * 50, least_s=4.0)[0].max_wait_s() == 4.0
    assert after([1e4] * 50, most_s=60.0)[0].max_wait_s() == 60.0


def test_an_arrival_is_overdue_only_after_max_wait_and_a_break_starts_again():
    made, now = after([1.0] * 50, least_s=3.0)
    assert not made.overdue(now + 2.9)
    assert made.overdue(now + 3.1)
    made.again(now + 100.0)
    assert not made.overdue(now + 102.0)
    assert made.max_wait_s() == 3.0
