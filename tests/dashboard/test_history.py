"""Columns of limited size, and rates of growing sums."""

from __future__ import annotations

from atoll_dashboard.feed.history import History, Rates
from atoll_dashboard.feed.run_rates import RunRates
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


def test_another_run_or_a_backup_starts_rates_again():
    rates = RunRates()
    assert not rates.is_another(look(5.0))
    rates.take(look(5.0))
    assert not rates.is_another(look(6.0))
    assert rates.is_another(look(6.0, "another"))
    assert rates.is_another(look(4.0))
