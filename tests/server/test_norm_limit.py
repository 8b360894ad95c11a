"""The expected norm of a fragment, and the limits relative to it."""

from __future__ import annotations

import pytest
from atoll_server.merging.norm_limit import AGREED, NormLimiter, NormVerdict


def limiter(norms, steps=24, limit: float = 10.0, clip: float = 0.0, window: int = 8) -> NormLimiter:
    made = NormLimiter(window, limit, clip)
    for norm in norms:
        made.note("a", norm, steps)
    return made


def test_no_norm_is_refused_before_the_window_is_full():
    assert limiter([1.0] * 7).judge(1e9, 24) == NormVerdict()
    assert limiter([1.0] * 8).judge(1e9, 24).refusal


def test_a_refusal_states_the_norm_its_limit_and_the_fix():
    assert limiter([1.0] * 8).judge(9.9, 24) == NormVerdict()
    refusal = limiter([1.0] * 8).judge(10.1, 24).refusal
    for word in ("norm 10.1", "10.1 times", "limit 10", "the learner drops this work", "lower"):
        assert word in refusal


@pytest.mark.parametrize(
    ("steps", "largest"), [(24, 10.0), (240, 100.0), (6, 5.0)], ids=["as many", "ten times as many", "a quarter"]
)
def test_more_steps_may_move_further_and_fewer_less(steps, largest):
    usual = limiter([1.0] * 8)
    assert not usual.judge(0.99 * largest, steps).refusal
    assert usual.judge(1.01 * largest, steps).refusal


def test_clipping_scales_only_norms_above_the_limit():
    usual = limiter([1.0] * 8, clip=2.0)
    assert usual.judge(2.0, 24).scale == 1.0
    assert usual.judge(8.0, 24).scale == pytest.approx(0.25)
    assert usual.judge(80.0, 24).refusal


HERE = frozenset("abcd")


def test_one_islands_garbage_does_not_move_the_median_however_much_it_sends():
    usual = limiter([1.0] * 8)
    for _ in range(40):
        for name, norm in (("a", 1.0), ("b", 1.1), ("c", 0.9), *[("d", 1e6)] * 8):
            assert bool(usual.enter(name, norm, 24, HERE).refusal) == (norm == 1e6)


def test_each_learner_has_one_share_of_the_window():
    usual = limiter([1.0] * 8)
    for _ in range(40):
        for name, norm in (("a", 1.0), ("b", 1.0), *[("d", 9.0)] * 8):
            assert not usual.enter(name, norm, 24, HERE).refusal
    assert usual.judge(10.1, 24).refusal, "the median must not follow one learner"


def test_the_limit_follows_a_change_of_all_norms_after_a_few_rounds():
    usual = limiter([])
    for _ in range(4):
        for name in "abcd":
            usual.enter(name, 1.0, 24, HERE)
    refused = [bool(usual.enter(name, 5e3, 24, HERE).refusal) for _ in range(AGREED + 1) for name in "abcd"]
    assert refused == [True] * (4 * AGREED) + [False] * 4
    assert not usual.judge(5e3, 24).refusal
    assert usual.judge(5e4 + 5e3, 24).refusal, "larger norms must still be refused"


def test_half_of_the_present_learners_are_not_enough_to_change_the_reference():
    usual = limiter([])
    for _ in range(4):
        for name in "abcd":
            usual.enter(name, 1.0, 24, HERE)
    for _ in range(3 * AGREED):
        assert usual.enter("c", 5e3, 24, HERE).refusal
        assert usual.enter("d", 5e3, 24, HERE).refusal
    assert not usual.enter("d", 5e3, 24, frozenset("bcd")).refusal


def test_steps_that_are_declared_excuse_a_larger_norm_so_far_only():
    usual = limiter([1.0] * 8)
    assert not usual.judge(99.0, 1 << 40).refusal
    assert usual.judge(101.0, 1 << 40).refusal


def test_any_number_of_learners_needs_limited_memory():
    usual = limiter([1.0] * 8)
    for number in range(1000):
        usual.enter(f"{number}", 1.0 if number % 2 else 1e6, 24, HERE)
    assert (len(usual._usual.taken), len(usual._usual.refused)) == (8, 8)


def test_a_limit_of_zero_is_off_and_zero_norms_are_no_reference():
    assert limiter([1.0] * 8, limit=0.0).judge(1e9, 24) == NormVerdict()
    assert limiter([0.0] * 8).judge(1e9, 24) == NormVerdict()


def test_norms_that_grow_with_a_warm_up_are_not_refused():
    rounds, learners = 40, 4
    usual = NormLimiter(32, 10.0, 0.0)
    for number in range(1, rounds):
        norm = number**3 - (number - 1) ** 3  # for a norm that grows with the square of the steps
        for learner in range(learners):
            assert not usual.enter(f"{learner}", norm, 24, HERE).refusal, f"round {number}"
