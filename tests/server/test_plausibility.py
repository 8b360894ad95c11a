"""The counted part of reports is limited for false reports, and complete for honest learners."""

from __future__ import annotations

import random

import pytest
from atoll.stats import Counters
from atoll_server.learners.goodput import TimeAccount
from atoll_server.learners.learner_counters import IncarnationCounters
from atoll_server.learners.learner_registry import LearnerRegistry
from atoll_server.learners.plausibility import (
    FASTER,
    HELD,
    MAX_STEPS_S,
    MAX_TOKENS_S,
    Declared,
    MaxRates,
    Rate,
    Rates,
    counted,
    credited,
    parts_counted,
)

USUAL = Rate(steps_s=1.0, batch=100.0)
RATES = Rates({"a": USUAL, "b": USUAL, "c": USUAL})


def test_a_report_of_more_tokens_than_time_allows_counts_as_far_as_time_allows():
    account = TimeAccount(first_joined_at=0.0, heard_at=0.0)
    account.joined(0.0, 0.0, returning=False)
    for second in range(1, 101):
        account.heard(float(second), IncarnationCounters(steps=1 << 40, tokens=1 << 50), RATES.most("liar"))
    assert account.current.tokens == pytest.approx(FASTER * USUAL.tokens_s * 100, rel=0.01)
    assert account.current.steps == pytest.approx(FASTER * USUAL.steps_s * 100, rel=0.01)


def test_no_report_of_an_honest_learner_is_cut_however_late_it_comes():
    """The learner is ten times as fast, its reports arrive late and together, and it trains during outages."""
    for seed in range(200):
        rng = random.Random(seed)
        steps_s = USUAL.steps_s * rng.uniform(0.1, 8.0)
        account = TimeAccount(first_joined_at=0.0, heard_at=0.0)
        account.joined(0.0, 0.0, returning=False)
        now = 0.0
        for _ in range(200):
            now += rng.choice((0.05, 0.25, 0.25, 1.0, 60.0))
            told_at = max(0.0, now - rng.uniform(0.0, 1.0))
            steps = max(account.current.steps, int(told_at * steps_s))
            account.heard(now, IncarnationCounters(steps=steps, tokens=100 * steps), RATES.most("fast"))
            assert (account.current.steps, account.current.tokens) == (steps, 100 * steps), seed


def test_uncounted_work_counts_as_soon_as_time_allows():
    tokens, paid = counted(5000, 0, 1000.0, 0.0, 1.0)
    assert (tokens, paid) == (1000, 1.0)
    assert counted(5000, tokens, 1000.0, paid, 5.0)[0] == 5000


def test_most_of_the_others_say_what_is_plausible_and_liars_do_not_raise_each_other():
    assert Rates({}).most("alone") == Rates({"alone": USUAL}).most("alone") == MaxRates(MAX_STEPS_S, MAX_TOKENS_S)
    liars = {"liar": Rate(1e3, 1e6), "other": Rate(1e3, 1e6)}
    rates = Rates({"a": USUAL, "b": USUAL, "c": USUAL, "d": USUAL} | liars)
    assert rates.usual("a") == USUAL
    assert rates.most("new") == MaxRates(FASTER * 1.0, FASTER * 100.0)
    assert rates.most("liar") == rates.most("new"), "earlier counted tokens must not raise the limit"


def test_tokens_are_held_back_while_others_are_about_to_train_and_all_count_afterwards():
    """The first learner to finish compiling is honest. Once another one trains, all its work counts."""
    assert Rates({"first": USUAL}, {"b"}).most("first") == HELD
    assert Rates({}, {"first"}).most("first") == MaxRates()
    account = TimeAccount(first_joined_at=0.0, heard_at=0.0)
    account.joined(0.0, 0.0, returning=False)
    for second in range(1, 61):
        account.heard(float(second), IncarnationCounters(steps=second, tokens=100 * second), HELD)
        assert (account.current.steps, account.current.tokens) == (second, 0)
    assert account.balance(60.0).lost_s["thrown_away"] == 0.0
    slow = Rates({"first": USUAL, "b": Rate(0.2, 100.0)}).most("first")
    account.heard(61.0, IncarnationCounters(steps=61, tokens=6100), slow)
    assert account.current.tokens == 6100


def early_liar(registry: LearnerRegistry, core_restarts: bool) -> int:
    """Returns the counted tokens of a liar that reports for 30 s before and 30 s after the others' first step."""
    names = ("liar", "a", "b")
    for number, name in enumerate(names, 1):
        registry.join(name, "eu", number, 0, 0.0, b"", b"t", 0.0, 0.0)
    for tick in range(1, 240):
        now = tick / 4
        if core_restarts and tick == 150:
            older, registry = registry, LearnerRegistry(4)
            registry.since = now
            for entry in older.entries.values():
                row = (entry.name, entry.region, entry.incarnation, entry.nonces, entry.account.as_data(), "")
                registry.restore(*row)
        for name in names:
            account = registry.entries[name].account
            steps = 4 * max(0, tick - 120)
            seen = (
                IncarnationCounters(steps=tick, tokens=1 << 50)
                if name == "liar"
                else IncarnationCounters(steps=steps, tokens=10 * steps)
            )
            account.heard(now, seen, registry.rates(now).most(name))
            account.step_time_s = 0.25 if name == "liar" else 1 / 16 if tick > 120 else None
            if name != "liar" and tick > 130:
                assert account.current.tokens == 10 * steps, "an honest learner must lose no tokens"
    return int(registry.entries["liar"].account.current.tokens)


@pytest.mark.parametrize("core_restarts", [False, True])
def test_a_liar_that_reports_before_the_others_first_step_counts_ten_times_one_of_them(core_restarts):
    assert 0 < early_liar(LearnerRegistry(4), core_restarts) <= FASTER * 160 * 60


def test_learners_that_are_away_are_a_measure_for_an_hour_and_then_one_is_alone():
    registry = LearnerRegistry(4)
    for number, name in enumerate(("here", "away"), 1):
        registry.join(name, "eu", number, 0, 0.0, b"", b"t", 0.0, 0.0)
        registry.entries[name].account.heard(10.0, IncarnationCounters(steps=100, tokens=1000))
        registry.entries[name].account.step_time_s = 0.1
    assert registry.rates(3000.0).most("here") == MaxRates(FASTER * 10.0, FASTER * 100.0)
    assert registry.rates(4000.0).most("here") == MaxRates()
    registry.since = 3500.0
    assert registry.rates(4001.0).most("here").tokens_s == FASTER * 100.0, "the core's downtime is no absence"


def test_a_learner_that_joined_and_never_trains_holds_nothing_back_for_long():
    registry = LearnerRegistry(4)
    for number, name in enumerate(("here", "stuck", "gone"), 1):
        registry.join(name, "eu", number, 0, 0.0, b"", b"t", 0.0, 0.0)
    with registry.entries["stuck"].stream(lambda _: None):
        assert registry.rates(100.0).most("here") == HELD
        assert registry.rates(4000.0).most("here") == MaxRates()
    assert registry.rates(50.0).most("here") == HELD
    assert registry.rates(100.0).most("here") == MaxRates(), "a disconnected learner must not hold tokens back"


def test_in_a_merge_a_learner_weighs_ten_times_most_of_the_others_at_most():
    weights = {"a": 100.0, "b": 100.0, "c": 30.0, "liar": 1e9}
    parts = parts_counted(weights, 10.0)
    assert weights["liar"] * parts["liar"] == 10.0 * 100.0
    assert [parts[name] for name in "abc"] == [1.0, 1.0, 1.0]
    assert parts_counted({"alone": 1e9}, 10.0) == {"alone": 1.0}
    mixed = {"fast": 1000.0, "a": 100.0, "b": 100.0, "slow": 10.0}
    assert set(parts_counted(mixed, 10.0).values()) == {1.0}
    equal = parts_counted(mixed, 1.0)
    assert {name: mixed[name] * part for name, part in equal.items()} == {
        "fast": 100.0,
        "a": 100.0,
        "b": 100.0,
        "slow": 10.0,
    }


def test_a_liars_limit_does_not_grow_with_its_reports():
    """After a silence, all tokens that the time allows count at once, so the liar seems much faster than it is."""
    account, last = TimeAccount(first_joined_at=0.0, heard_at=0.0), 0.0
    account.joined(0.0, 0.0, returning=False)
    rates = Rates({"a": USUAL, "b": USUAL})
    for second in range(10, 210, 10):
        for now in (second, second + 0.25):
            account.heard(now, IncarnationCounters(steps=1 << 40, tokens=1 << 50), rates.most("liar"))
            steps, tokens = account.current.steps, account.current.tokens
            seems = Rate((steps - last) / (now - second or 0.25), tokens / steps)
            last, rates = steps, Rates({"a": USUAL, "b": USUAL, "liar": seems})
    assert account.current.tokens <= FASTER * USUAL.tokens_s * 210 * 1.01


def test_reports_of_tokens_without_steps_weigh_as_the_tokens_that_time_allows():
    """A liar steps at the usual pace, but reports ten times the tokens. A weight is tokens x tokens / steps."""
    own = Rate(steps_s=1.0, batch=4000.0)
    hostile = credited(Declared(1 << 50, 6), Declared(24_000, 6), 0, 0.25, own, USUAL)
    honest = USUAL.batch * 6
    assert hostile.steps == 6
    assert hostile.tokens <= FASTER * honest


def test_a_contribution_weighs_no_more_than_its_learner_reported_and_did_since():
    hostile = credited(Declared(1 << 50, 1 << 40), Declared(0, 0), 0, 0.5, None, USUAL)
    assert hostile.steps <= 5
    assert hostile.tokens <= 500
    few = credited(Declared(1 << 50, 1), Declared(1000, 10), 0, 0.0, USUAL, USUAL)
    assert few.tokens <= 1000, "a step may count ten times a usual step's tokens"
    spent = credited(Declared(2400, 24), Declared(2400, 24), 2400, 0.0, USUAL, USUAL)
    assert spent.tokens <= 500, "tokens must count once per fragment"


def test_no_contribution_of_an_honest_learner_is_cut_though_it_overtakes_its_report():
    """The learner trains nine times the others' tokens per second, in more or in larger steps."""
    for seed in range(500):
        rng = random.Random(seed)
        steps_s, batch = rng.uniform(0.2, 5.0), rng.uniform(10, 1000)
        own = Rate(steps_s, batch)
        taken, given = 0, 0
        now, heard_at = 0.0, 0.0
        for _ in range(50):
            now += rng.uniform(1.0, 50.0)
            heard_at = now - rng.uniform(0.0, 1.0)
            done = int(now * own.steps_s)
            reported = int(max(0.0, heard_at - rng.uniform(0.0, 0.5)) * own.steps_s)
            if done == taken:
                continue
            said = Declared(int((done - taken) * own.batch), done - taken)
            known = own if rng.random() < 0.9 else None
            steps, tokens = rng.uniform(0.1, 10.0), rng.uniform(1 / 9, 10.0)
            usual = own if known is None else Rate(steps_s * steps, batch * tokens / steps)
            assert (
                credited(said, Declared(int(reported * own.batch), reported), given, now - heard_at, known, usual)
                == said
            )
            taken, given = done, given + said.tokens


def taken_up(registry: LearnerRegistry) -> LearnerRegistry:
    """Returns the registry as a restarted core restores it."""
    again = LearnerRegistry(4)
    for entry in registry.entries.values():
        row = (entry.name, entry.region, entry.incarnation, entry.nonces, entry.account.as_data(), entry.evicted)
        again.restore(*row)
    return again


def test_tokens_of_an_evicted_liar_are_struck_for_good_and_schedules_follow():
    registry, learner = LearnerRegistry(4), Counters()
    for name in ("honest", "liar"):
        registry.join(name, "eu", len(name), 0, 0.0, b"", b"t", 0.0, 0.0)
        registry.entries[name].account.heard(10.0, IncarnationCounters(steps=10, tokens=1000))
    registry.entries["liar"].account.heard(20.0, IncarnationCounters(steps=10, tokens=1 << 40))
    registry = taken_up(registry)
    liar = registry.entries["liar"]
    before = (registry.tokens(), registry.voided_tokens())
    learner.told(registry.tokens(), registry.voided_tokens())
    registry.evict(liar, "it lies", 30.0)
    registry.void_tokens(liar, 500)
    learner.told(registry.tokens(), registry.voided_tokens())
    assert (registry.tokens(), learner.run_tokens) == (1500, 1500)
    assert [learner.run_tokens_after(1 << 40), learner.run_tokens_after(1600)] == [1500, 1600]
    learner.told(*before)
    assert learner.run_tokens == 1500, "an older merge's count must not correct the total"
    again = taken_up(registry)
    assert (again.tokens(), again.voided_tokens()) == (1500, registry.voided_tokens())
    learner.told(1400, registry.voided_tokens())
    assert learner.run_tokens == 1500, "a restarted core's count must not correct the total"


def test_tokens_that_a_restored_checkpoint_left_behind_do_not_count_and_the_sums_follow_each_report():
    registry, learner = LearnerRegistry(4), Counters(tokens=1000)
    entry = registry.join("a", "eu", 1, 0, 0.0, b"", b"t", 0.0, 0.0)
    registry.heard(entry, 10.0, IncarnationCounters(steps=10, tokens=1000))
    learner.told(registry.tokens(), registry.voided_tokens())
    entry.account.restored(400, 0.0)
    registry = taken_up(registry)
    assert (registry.tokens(), registry.voided_tokens()) == (400, 600)
    learner.told(registry.tokens(), registry.voided_tokens(), restored=True)
    assert (learner.run_tokens_after(1 << 40), learner.known_tokens()) == (400, 400)
    entry = registry.entries["a"]
    registry.heard(
        entry, 20.0, IncarnationCounters(steps=12, tokens=1200)
    )  # the learner kept training until it heard of the restore
    assert (registry.tokens(), registry.voided_tokens()) == (400, 800)
    registry.heard(entry, 30.0, IncarnationCounters(steps=13, tokens=1300))
    assert (registry.tokens(), registry.voided_tokens()) == (500, 800)
    registry.void_tokens(entry, 450)
    assert (registry.tokens(), registry.voided_tokens()) == (450, 850)
    assert registry.counted_tokens() == {"a": 450}
    assert taken_up(registry).tokens() == 450


def test_a_rate_is_compared_as_soon_as_another_one_is_known():
    registry = LearnerRegistry(4)
    for name in ("honest", "liar"):
        registry.join(name, "eu", len(name), 0, 0.0, b"", b"t", 0.0, 0.0)
    assert registry.rates(1.0).most("liar") == HELD
    honest = registry.entries["honest"].account
    honest.heard(1.0, IncarnationCounters(steps=10, tokens=1000))
    honest.step_time_s = 0.1
    assert registry.rates(1.01).most("liar") == MaxRates(FASTER * 10.0, FASTER * 1000.0)


def test_a_restarted_learners_rate_includes_the_tokens_that_did_not_count_yet():
    """Otherwise its rate would be 0 tokens per second, and no other learner's tokens would count."""
    registry = LearnerRegistry(4)
    for name in ("first", "starting"):
        registry.join(name, "eu", len(name), 0, 0.0, b"", b"t", 0.0, 0.0)
    first = registry.entries["first"].account
    first.heard(1.0, IncarnationCounters(steps=10, tokens=1000), HELD)
    first.step_time_s = 0.1
    assert first.total("tokens") == 0
    first.joined(2.0, 0.0, returning=True)
    assert registry.rates(2.01).most("starting") == MaxRates(FASTER * 10.0, FASTER * 1000.0)
