"""What is usual for a fragment, and what is too far from it."""

from __future__ import annotations

import pytest
from atoll_server.guard import Guard, Verdict


def guard(norms, steps=24, limit: float = 10.0, clip: float = 0.0, window: int = 8) -> Guard:
    made = Guard(1, window, limit, clip)
    for norm in norms:
        made.note(0, norm, steps)
    return made


def test_before_the_window_is_full_nothing_is_judged():
    assert guard([1.0] * 7).judge(0, 1e9, 24) == Verdict()
    assert guard([1.0] * 8).judge(0, 1e9, 24).refusal


def test_a_refusal_names_the_norm_how_far_it_is_and_the_cure():
    assert guard([1.0] * 8).judge(0, 9.9, 24) == Verdict()
    refusal = guard([1.0] * 8).judge(0, 10.1, 24).refusal
    for word in ("norm 10.1", "10.1 times", "limit 10", "goes on from the others' parameters"):
        assert word in refusal


@pytest.mark.parametrize(
    ("steps", "largest"), [(24, 10.0), (240, 100.0), (6, 5.0)], ids=["as many", "ten times as many", "a quarter"]
)
def test_more_steps_may_move_further_and_fewer_less(steps, largest):
    usual = guard([1.0] * 8)
    assert not usual.judge(0, 0.99 * largest, steps).refusal
    assert usual.judge(0, 1.01 * largest, steps).refusal


def test_clipping_scales_down_to_the_limit_and_touches_nothing_below_it():
    usual = guard([1.0] * 8, clip=2.0)
    assert usual.judge(0, 2.0, 24).scale == 1.0
    assert usual.judge(0, 8.0, 24).scale == pytest.approx(0.25)
    assert usual.judge(0, 80.0, 24).refusal


def test_one_islands_garbage_does_not_move_the_median_and_a_change_of_all_does():
    usual = guard([1.0] * 8)
    for _ in range(40):  # a quarter of what comes is garbage
        for norm in (1.0, 1.1, 0.9, 1e6):
            assert bool(usual.judge(0, norm, 24).refusal) == (norm == 1e6)
            usual.note(0, norm, 24)
    refused = 0
    while usual.judge(0, 50.0, 24).refusal:
        usual.note(0, 50.0, 24)
        refused += 1
        assert refused <= 8, "a change of all is followed within a window"


def test_a_limit_of_zero_is_none_and_zero_norms_judge_nothing():
    assert guard([1.0] * 8, limit=0.0).judge(0, 1e9, 24) == Verdict()
    assert guard([0.0] * 8).judge(0, 1e9, 24) == Verdict()


def test_norms_that_grow_with_a_warm_up_are_not_refused():
    rounds, learners = 40, 4
    usual = Guard(1, 32, 10.0, 0.0)
    for number in range(1, rounds):
        norm = number**3 - (number - 1) ** 3  # of a rate that grows with the square of the steps
        for _ in range(learners):
            assert not usual.judge(0, norm, 24).refusal, f"round {number}"
            usual.note(0, norm, 24)
