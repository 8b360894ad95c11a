"""Goodput: what counts, what is lost to what, and that nobody can talk it up."""

from __future__ import annotations

import math

import pytest
from atoll_server.goodput import Account, Spent, overall


def account() -> Account:
    fresh = Account(first_joined_at=0.0, heard_at=0.0)
    fresh.joined(0.0, 0.0, returning=False)
    return fresh


def test_useful_is_stepping_and_the_rest_is_named():
    a = account()
    a.heard(100.0, Spent(steps=90, tokens=900, stepping_s=90.0, blocked_s=1.0, joining_s=4.0))
    balance = a.balance(100.0)
    assert balance.ratio == pytest.approx(0.9)
    assert balance.lost_s["blocked"] == 1.0
    assert balance.lost_s["joining"] == 4.0
    assert balance.lost_s["other"] == pytest.approx(5.0)


def test_a_restart_costs_downtime_the_restart_itself_and_the_work_that_was_never_acknowledged():
    a = account()
    a.heard(50.0, Spent(tokens=500, stepping_s=50.0))
    a.accepted(400.0, current=True)
    a.joined(70.0, 8.0, returning=True)
    a.heard(100.0, Spent(tokens=300, stepping_s=30.0))
    balance = a.balance(100.0)
    assert balance.lost_s["restarting"] == 8.0
    assert balance.lost_s["down"] == 12.0
    assert balance.lost_s["thrown_away"] == pytest.approx(10.0)
    assert balance.useful_s == pytest.approx(70.0)
    assert balance.provisioned_s == 100.0


def test_a_contribution_of_a_dead_incarnation_that_is_refused_after_all_is_lost():
    a = account()
    a.heard(10.0, Spent(tokens=100, stepping_s=10.0))
    a.accepted(100.0, current=True)
    a.joined(10.0, 0.0, returning=True)
    assert a.balance(10.0).lost_s["thrown_away"] == 0.0
    a.accepted(-50.0, current=False)
    assert a.balance(10.0).lost_s["thrown_away"] == pytest.approx(5.0)


def test_pauses_and_absence_after_a_good_bye_are_not_provisioned():
    a = account()
    a.heard(100.0, Spent(tokens=600, stepping_s=60.0, paused_s=40.0))
    assert a.balance(100.0).ratio == pytest.approx(1.0)
    a.left_at = 100.0
    assert a.balance(500.0).provisioned_s == pytest.approx(60.0)
    a.joined(600.0, 2.0, returning=True)
    assert a.balance(600.0).provisioned_s == pytest.approx(60.0)
    assert a.balance(600.0).lost_s["down"] == 0.0


def test_a_learner_cannot_have_trained_longer_than_it_was_there():
    a = account()
    for odd in (1e9, math.nan, math.inf, -5.0):
        a.heard(10.0, Spent(tokens=1, stepping_s=odd, paused_s=odd, blocked_s=odd, joining_s=odd))
        assert 0.0 <= a.balance(10.0).ratio <= 1.0


def test_a_frozen_process_is_lost_while_it_is_frozen_and_stays_lost_when_it_wakes():
    a = account()
    a.step_time_s = 0.5
    a.heard(20.0, Spent(steps=40, tokens=400, stepping_s=20.0))
    assert a.balance(80.0).ratio == pytest.approx(0.25)
    a.heard(80.0, Spent(steps=40, tokens=400, stepping_s=20.0))  # it wakes, in the middle of a step
    a.heard(80.5, Spent(steps=41, tokens=410, stepping_s=80.5))
    a.heard(90.0, Spent(steps=60, tokens=600, stepping_s=90.0))
    balance = a.balance(90.0)
    assert balance.useful_s == pytest.approx(30.0, abs=1.0)
    assert balance.lost_s["down"] == pytest.approx(60.0, abs=1.0)
    a.heard(110.0, Spent(steps=100, tokens=1000, stepping_s=110.0))
    assert a.balance(110.0).useful_s == pytest.approx(50.0, abs=1.0), "what is trained afterwards counts"


def test_who_is_cut_off_and_trains_on_is_not_taken_for_frozen_and_a_slow_step_neither():
    a = account()
    a.step_time_s = 0.5
    a.heard(20.0, Spent(steps=40, tokens=400, stepping_s=20.0))
    a.heard(80.0, Spent(steps=160, tokens=1600, stepping_s=80.0))
    assert a.balance(80.0).ratio == pytest.approx(1.0)
    for second in range(81, 141):
        a.heard(float(second), Spent(steps=160, tokens=1600, stepping_s=80.0))
    a.heard(140.0, Spent(steps=161, tokens=1610, stepping_s=140.0))
    assert a.balance(140.0).ratio == pytest.approx(1.0)


def test_training_while_the_core_was_away_is_not_lost():
    a = account()
    a.heard(10.0, Spent(tokens=100, stepping_s=10.0))
    a.heard(60.0, Spent(tokens=600, stepping_s=60.0))
    assert a.balance(60.0).ratio == pytest.approx(1.0)


def test_an_account_survives_its_ledger_form_and_sums_are_made_anew():
    a = account()
    a.heard(10.0, Spent(tokens=100, stepping_s=10.0))
    a.joined(12.0, 1.0, returning=True)
    a.merged_token_parameters, a.bytes_up = 7, 8
    again = Account.from_data(a.as_data())
    assert again == a
    again.forget_contributions()
    assert (again.merged_token_parameters, again.bytes_up, again.past[0].accepted_tokens) == (0, 0, 0.0)


def test_the_run_is_the_sum_of_its_learners():
    a, b = account(), account()
    a.heard(10.0, Spent(tokens=1, stepping_s=10.0))
    b.heard(10.0, Spent(tokens=1, stepping_s=5.0))
    assert overall([a.balance(10.0), b.balance(10.0)]).ratio == pytest.approx(0.75)
