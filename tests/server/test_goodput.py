"""Goodput: useful time, the causes of lost time, and limits on false reports."""

from __future__ import annotations

import bisect
import json
import math
import random

import pytest
from atoll_server.learners.goodput import TimeAccount, total_goodput
from atoll_server.learners.learner_counters import IncarnationCounters
from atoll_server.learners.plausibility import MaxRates


def account() -> TimeAccount:
    fresh = TimeAccount(first_joined_at=0.0, heard_at=0.0)
    fresh.joined(0.0, 0.0, returning=False)
    return fresh


def test_stepping_is_useful_time_and_other_time_has_a_cause():
    a = account()
    a.heard(100.0, IncarnationCounters(steps=90, tokens=900, stepping_s=90.0, blocked_s=1.0, joining_s=4.0))
    balance = a.balance(100.0)
    assert balance.ratio == pytest.approx(0.9)
    assert balance.lost_s["blocked"] == 1.0
    assert balance.lost_s["joining"] == 4.0
    assert balance.lost_s["other"] == pytest.approx(5.0)


def test_a_restart_costs_downtime_the_restart_itself_and_the_work_that_was_never_acknowledged():
    a = account()
    a.heard(50.0, IncarnationCounters(tokens=500, stepping_s=50.0))
    a.accepted(0, 400.0, current=True)
    a.joined(70.0, 8.0, returning=True)
    a.heard(100.0, IncarnationCounters(tokens=300, stepping_s=30.0))
    balance = a.balance(100.0)
    assert balance.lost_s["restarting"] == 8.0
    assert balance.lost_s["down"] == 12.0
    assert balance.lost_s["thrown_away"] == pytest.approx(10.0)
    assert balance.useful_s == pytest.approx(70.0)
    assert balance.provisioned_s == 100.0


def test_a_dead_incarnations_refused_contribution_counts_as_lost():
    a = account()
    a.heard(10.0, IncarnationCounters(tokens=100, stepping_s=10.0))
    a.accepted(0, 100.0, current=True)
    a.joined(10.0, 0.0, returning=True)
    assert a.balance(10.0).lost_s["thrown_away"] == 0.0
    a.accepted(0, -50.0, current=False)
    assert a.balance(10.0).lost_s["thrown_away"] == pytest.approx(5.0)


def test_silence_before_an_operator_ends_a_learner_stays_down_time():
    a = account()
    a.heard(50.0, IncarnationCounters(steps=50, tokens=500, stepping_s=50.0))
    before = a.balance(150.0)
    a.left(150.0, itself=False)
    for end in (150.0, 400.0):
        assert a.balance(end) == before
        a.left(end, itself=False)  # a second eviction extends nothing
    assert before.lost_s["down"] == 100.0
    assert before.lost_s["other"] == 0.0


def test_pauses_and_time_after_leave_are_not_provisioned():
    a = account()
    a.heard(100.0, IncarnationCounters(tokens=600, stepping_s=60.0, paused_s=40.0))
    assert a.balance(100.0).ratio == pytest.approx(1.0)
    a.left_at = 100.0
    assert a.balance(500.0).provisioned_s == pytest.approx(60.0)
    a.joined(600.0, 2.0, returning=True)
    assert a.balance(600.0).provisioned_s == pytest.approx(60.0)
    assert a.balance(600.0).lost_s["down"] == 0.0


def test_a_learner_cannot_have_trained_longer_than_it_was_connected():
    a = account()
    for odd in (1e9, math.nan, math.inf, -5.0):
        a.heard(10.0, IncarnationCounters(tokens=1, stepping_s=odd, paused_s=odd, blocked_s=odd, joining_s=odd))
        assert 0.0 <= a.balance(10.0).ratio <= 1.0


def test_a_frozen_process_is_lost_while_it_is_frozen_and_stays_lost_when_it_wakes():
    a = account()
    a.step_time_s = 0.5
    a.heard(20.0, IncarnationCounters(steps=40, tokens=400, stepping_s=20.0))
    assert a.balance(80.0).ratio == pytest.approx(0.25)
    a.heard(80.0, IncarnationCounters(steps=40, tokens=400, stepping_s=20.0))  # it wakes in the middle of a step
    a.heard(80.5, IncarnationCounters(steps=41, tokens=410, stepping_s=80.5))
    a.heard(90.0, IncarnationCounters(steps=60, tokens=600, stepping_s=90.0))
    balance = a.balance(90.0)
    assert balance.useful_s == pytest.approx(30.0, abs=1.0)
    assert balance.lost_s["down"] == pytest.approx(60.0, abs=1.0)
    a.heard(110.0, IncarnationCounters(steps=100, tokens=1000, stepping_s=110.0))
    assert a.balance(110.0).useful_s == pytest.approx(50.0, abs=1.0), "later training must count"


def frozen(rng: random.Random) -> tuple[float, float, float]:
    """Simulates a process that steps, is frozen for a while within a step, and continues.

    Returns the counted useful seconds, the true useful seconds, and the duration of an inner step. Reports are sent at
    any moment and arrive late. Some from before the freeze arrive when the process wakes.
    """
    a, step_s = account(), rng.choice((0.02, 0.5, 2.0))
    a.step_time_s = step_s
    stands_at = rng.uniform(60.0, 70.0)
    wakes_at = stands_at + rng.uniform(12.0, 300.0)
    last_s = wakes_at + rng.uniform(20.0, 60.0)
    ends, at = [], 0.0
    while at < last_s:
        began, at = at, at + step_s * rng.uniform(0.7, 1.3)
        if began < stands_at <= at:
            at += wakes_at - stands_at
        ends.append(at)
    made = sorted(rng.uniform(0.0, last_s) for _ in range(int(last_s * 4)))
    made = [moment for moment in made if not stands_at < moment < wakes_at] + [last_s]
    late = [moment for moment in made if moment < stands_at][-rng.randrange(4) :]  # these were in flight
    told_at = 0.0
    for moment in made:
        steps = bisect.bisect(ends, moment)
        arrival = wakes_at if moment in late and moment < stands_at and rng.random() < 0.7 else moment
        told_at = max(told_at, arrival + rng.uniform(0.0, 0.3))
        a.heard(told_at, IncarnationCounters(steps=steps, tokens=steps, stepping_s=ends[steps - 1] if steps else 0.0))
    return a.balance(told_at).useful_s, ends[steps - 1] - (wakes_at - stands_at), step_s


def test_frozen_time_is_lost_for_any_first_report_after_waking():
    """The first report contains steps from before the freeze, the frozen step, or neither."""
    for seed in range(2000):
        counted, trained, step_s = frozen(random.Random(seed))
        assert counted == pytest.approx(trained, abs=4.0 + 3.3 * step_s), seed


def test_the_step_that_stood_may_come_after_steps_of_before():
    a = account()
    a.step_time_s = 0.02
    for quarter in range(1, 21):
        a.heard(quarter / 4, IncarnationCounters(steps=12 * quarter, tokens=12 * quarter, stepping_s=0.25 * quarter))
    a.heard(30.0, IncarnationCounters(steps=243, tokens=243, stepping_s=5.04))
    a.heard(30.25, IncarnationCounters(steps=255, tokens=255, stepping_s=30.25))
    assert a.balance(30.25).useful_s == pytest.approx(5.25, abs=0.2)
    a.heard(90.0, IncarnationCounters(steps=256, tokens=256, stepping_s=90.0))
    assert a.balance(90.0).useful_s > 5.0, "a silence must be charged once"


def test_a_silence_without_a_step_is_not_charged_to_a_long_step_much_later():
    a = account()
    a.step_time_s = 0.5
    a.heard(20.0, IncarnationCounters(steps=40, tokens=40, stepping_s=20.0))
    a.heard(80.0, IncarnationCounters(steps=40, tokens=40, stepping_s=20.0, paused_s=60.0))
    for second in range(81, 111):
        a.heard(float(second), IncarnationCounters(steps=40, tokens=40, stepping_s=20.0, paused_s=60.0))
    a.heard(110.0, IncarnationCounters(steps=41, tokens=41, stepping_s=50.0, paused_s=60.0))
    assert a.balance(110.0).useful_s == pytest.approx(50.0)


def test_a_disconnected_learner_and_a_slow_step_do_not_count_as_frozen():
    a = account()
    a.step_time_s = 0.5
    a.heard(20.0, IncarnationCounters(steps=40, tokens=400, stepping_s=20.0))
    a.heard(80.0, IncarnationCounters(steps=160, tokens=1600, stepping_s=80.0))
    assert a.balance(80.0).ratio == pytest.approx(1.0)
    for second in range(81, 141):
        a.heard(float(second), IncarnationCounters(steps=160, tokens=1600, stepping_s=80.0))
    a.heard(140.0, IncarnationCounters(steps=161, tokens=1610, stepping_s=140.0))
    assert a.balance(140.0).ratio == pytest.approx(1.0)


def test_training_without_the_core_is_not_lost():
    a = account()
    a.heard(10.0, IncarnationCounters(tokens=100, stepping_s=10.0))
    a.heard(60.0, IncarnationCounters(tokens=600, stepping_s=60.0))
    assert a.balance(60.0).ratio == pytest.approx(1.0)


def test_an_account_survives_the_ledger_with_the_counts_of_absent_shards():
    a = account()
    a.heard(10.0, IncarnationCounters(tokens=100, stepping_s=10.0))
    a.joined(12.0, 1.0, returning=True)
    a.at(0).bytes_up = 7
    a.at(1).bytes_up = 8
    assert a.bytes_up == 15
    again = TimeAccount.from_data(json.loads(json.dumps(a.as_data())))
    assert again == a
    earlier = {name: value for name, value in a.as_data().items() if name != "by_shard"}
    assert TimeAccount.from_data(earlier).bytes_up == 0, "a ledger of an earlier version lacks the value"


def test_work_acknowledged_by_all_shards_survives_a_dead_process():
    a = account()
    a.heard(10.0, IncarnationCounters(tokens=100, stepping_s=10.0))
    a.accepted(0, 50.0, current=True)
    a.accepted(1, 30.0, current=True)
    a.joined(10.0, 0.0, returning=True)
    assert a.balance(10.0).lost_s["thrown_away"] == pytest.approx(2.0)
    a.accepted(1, 20.0, current=False)
    assert a.balance(10.0).lost_s["thrown_away"] == pytest.approx(2.0), "the learner had counted the work as abandoned"


def test_work_undone_by_a_restore_is_thrown_away_once():
    a = account()
    a.heard(10.0, IncarnationCounters(tokens=100, stepping_s=10.0))
    a.accepted(0, 100.0, current=True)
    a.current.undone_tokens = 20.0
    a.at(1).undone_tokens = 30.0
    assert a.balance(10.0).lost_s["thrown_away"] == pytest.approx(5.0)
    a.joined(10.0, 0.0, returning=True)
    assert a.balance(10.0).lost_s["thrown_away"] == pytest.approx(5.0)
    assert a.at(1).undone_tokens == 0.0, "the work must count for the dead process"


def test_the_run_is_the_sum_of_its_learners():
    a, b = account(), account()
    a.heard(10.0, IncarnationCounters(tokens=1, stepping_s=10.0))
    b.heard(10.0, IncarnationCounters(tokens=1, stepping_s=5.0))
    assert total_goodput([a.balance(10.0), b.balance(10.0)]).ratio == pytest.approx(0.75)


def test_work_that_a_restored_backup_lacks_is_thrown_away_and_counted_once():
    a = account()
    a.heard(40.0, IncarnationCounters(steps=40, tokens=400, stepping_s=40.0))
    a.accepted(0, 400.0, current=True)
    a.restored(400, 0.0, kept_tokens=400.0)  # as the backup says, which was taken at 40 s
    a.by_shard.clear()
    a.accepted(0, 400.0, current=True)  # the shard adds up the backup's contributions again
    a.heard(100.0, IncarnationCounters(steps=100, tokens=1000, stepping_s=100.0), MaxRates(tokens_s=0.0))
    assert a.counted_tokens() == 400, "also the tokens that would count later are discarded"
    assert a.balance(100.0).lost_s["thrown_away"] == pytest.approx(60.0)
    a = TimeAccount.from_data(a.as_data())
    a.heard(101.0, IncarnationCounters(steps=101, tokens=1010, stepping_s=101.0, abandoned_tokens=100.0))
    assert a.counted_tokens() == 410
    a.accepted(0, 10.0, current=True)
    assert a.balance(101.0).lost_s["thrown_away"] == pytest.approx(60.0), "what the learner dropped is among it"
    a.joined(101.0, 0.0, returning=True)
    assert a.balance(101.0).lost_s["thrown_away"] == pytest.approx(60.0)
