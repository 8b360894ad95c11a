"""Columns of limited size, and rates of growing sums."""

from __future__ import annotations

import math

import pytest
from atoll_dashboard.feed.history import MAX_GAPS, History, Rates, ReportedRates
from atoll_dashboard.feed.run_rates import RunRates
from atoll_dashboard.models import conversion
from atoll_wire import outer_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st


def test_a_full_history_drops_values_but_keeps_its_ends():
    history: History[str] = History(100)
    for second in range(5000):
        history.add(float(second), {"a": float(second)} | ({"late": 1.0} if second > 4000 else {}))
    assert 40 <= len(history.at) <= 100
    assert history.at[0] == 0.0
    assert history.at[-1] > 4900
    assert history.column("a") == list(history.at), "columns and times must match"
    assert history.column("late")[0] is None
    assert history.column("late")[-1] == 1.0
    assert history.column("absent") == [None] * len(history.at)
    steps = [later - earlier for earlier, later in zip(history.at, history.at[1:], strict=False)]
    assert max(steps) <= 3 * min(steps), "the kept times must be spread evenly"


@given(st.lists(st.floats(0, 1e6), max_size=200), st.integers(2, 20))
def test_columns_are_always_as_long_as_their_times(gaps, most):
    history: History[str] = History(most)
    at = 0.0
    for number, gap in enumerate(gaps):
        at += gap
        history.add(at, {str(number % 3): gap})
        assert len(history.at) <= most
        assert all(len(history.column(str(name))) == len(history.at) for name in range(3))


def test_rates_are_those_of_the_window_and_never_negative():
    rates: Rates[str] = Rates(10.0)
    assert rates.rate("a") == 0.0
    for second in range(31):
        rates.add(float(second), {"a": 5.0 * second, "b": 100.0 if second < 25 else 150.0})
    assert rates.rate("a") == 5.0
    assert rates.rate("b") == 5.0
    assert rates.rate("absent") == 0.0
    rates.add(30.5, {"a": 152.5, "new": 21.0})
    assert rates.grown("new") == 21.0
    rates.add(31.0, {"a": 100.0})
    assert rates.rate("a") == 0.0
    rates.add(31.0, {"a": 1e9})
    assert rates.rate("a") == 0.0, "values at the same time must not count"


def look(at: float, run: str = "r", **learners: tuple[str, int]) -> pb.StatusReply:
    """Returns a status. learners: each learner's region, and the bytes that it has sent so far."""
    reply = pb.StatusReply(run=run, generation=1, at=at)
    for name, (region, sent) in learners.items():
        reply.learners.add(learner=name, region=region, tokens=sent, wire=pb.WireBytes(up=sent))
    return reply


def test_a_learner_that_moves_to_another_region_adds_no_old_bytes():
    rates = RunRates()
    rates.take(look(0.0, a=("eu", 10**12)))
    assert rates.bytes.rate(("eu", "up")) == 0.0, "bytes from before the first status have no rate"
    rates.take(look(10.0, a=("us", 10**12 + 100), b=("eu", 50)))
    assert rates.bytes.rate(("us", "up")) == 10.0
    assert rates.bytes.rate(("eu", "up")) == 5.0, "a new learner must begin at zero bytes"


def test_another_run_or_a_restore_starts_rates_again_and_a_restored_run_keeps_its_charts():
    rates = RunRates()
    assert rates.following(look(5.0)) is rates
    rates.take(look(5.0))
    assert rates.following(look(6.0)) is rates
    other, earlier = rates.following(look(6.0, "another")), rates.following(look(4.0))
    status = look(6.0)
    status.generation = 2
    restored = rates.following(status)
    assert rates not in (other, earlier, restored)
    assert [each.history is rates.history for each in (other, earlier, restored)] == [False, False, True]
    assert restored.gap, "the chart must not connect both generations"


def test_a_gap_is_kept_whatever_the_resolution():
    history: History[str] = History(100)
    for second in range(1000):
        if not 700 <= second < 703:
            history.add(float(second), {"a": 1.0}, gap=second == 703)
    assert history.gaps == [(699.0, 703.0)], "the gap must begin at the last measurement, not at the last point"
    for number in range(2 * MAX_GAPS):
        history.add(2000.0 + 10 * number + number % 3, {"a": 1.0}, gap=True)
    assert len(history.gaps) == MAX_GAPS
    assert history.gaps[0][0] == 699.0
    assert all(start < end for start, end in history.gaps)
    assert all(one[1] <= other[0] for one, other in zip(history.gaps, history.gaps[1:], strict=False))


def test_a_report_after_an_outage_is_not_a_spike():
    """A learner trains on 100 tokens per second, and reports every second, except between 50 s and 125 s.

    The core is killed at 50 s. When it is back at 123 s, it has forgotten the last 5 s.
    """
    rates: ReportedRates[str] = ReportedRates(10.0)
    rates.add(0.0, "a", 0)
    assert rates.rate("a") is None
    for second in [*range(1, 51), *range(123, 200)]:
        rates.add(second, "a", 4500 if second in {123, 124} else 100 * second)
        assert rates.rate("a") == 100.0, second


def test_a_slow_learner_has_a_steady_rate_and_a_silent_one_none():
    rates = RunRates()
    for second in range(0, 300, 5):
        reply = look(float(second), a=("eu", 3000 * (second // 30)))
        reply.learners[0].state = "live"
        rates.take(reply)
        assert rates.tokens_per_s(reply.learners[0]) == (100.0 if second >= 30 else None)
    reply.learners[0].state = "silent"
    assert rates.tokens_per_s(reply.learners[0]) == 0.0


def test_lost_time_is_that_of_the_last_hour():
    """The learner loses its first hour and half an hour of its third, and is polled every 5 s."""
    rates = RunRates()
    for second in range(0, 3 * 3600 + 1, 5):
        reply = look(float(second), a=("eu", 0))
        lost_s = min(second, 3600) + max(0, second - 9000)
        reply.learners[0].goodput.MergeFrom(pb.Goodput(provisioned_s=second, useful_s=second - lost_s))
        rates.take(reply)
    assert rates.lost_s("a") == 1800.0
    assert rates.lost.span_s() == pytest.approx(3600, abs=70)


def test_the_loss_of_learners_that_left_stays():
    def learner(name: str, state: str, loss: float, since: float) -> pb.LearnerStatus:
        return pb.LearnerStatus(learner=name, state=state, loss=loss, since=since)

    live, paused = learner("a", "live", 2.0, 5.0), learner("b", "paused", 3.0, 6.0)
    left, last = learner("c", "left", 9.0, 1.0), learner("d", "left", 2.5, 8.0)
    assert conversion.loss([live, left]) == 2.0
    assert conversion.loss([live, paused, last]) == 2.5
    assert conversion.loss([left, last, learner("e", "left", math.nan, 9.0)]) == 2.5
    assert conversion.loss([]) is None
