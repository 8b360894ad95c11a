"""How much of what a learner says is counted: less than a liar says, and all that an honest learner trained."""

from __future__ import annotations

import random

import pytest
from atoll.stats import Counters
from atoll_server.learners.accounts import Account, Spent
from atoll_server.learners.plausibility import (
    FASTER,
    HELD,
    MOST_STEPS_S,
    MOST_TOKENS_S,
    Declared,
    Most,
    Rate,
    Rates,
    counted,
    parts_counted,
    weighed,
)
from atoll_server.learners.registry import Roster

USUAL = Rate(steps_s=1.0, batch=100.0)
RATES = Rates({"a": USUAL, "b": USUAL, "c": USUAL})


def test_a_report_of_more_tokens_than_time_allows_counts_as_far_as_time_allows():
    account = Account(first_joined_at=0.0, heard_at=0.0)
    account.joined(0.0, 0.0, returning=False)
    for second in range(1, 101):
        account.heard(float(second), Spent(steps=1 << 40, tokens=1 << 50), RATES.most("liar"))
    assert account.current.tokens == pytest.approx(FASTER * USUAL.tokens_s * 100, rel=0.01)
    assert account.current.steps == pytest.approx(FASTER * USUAL.steps_s * 100, rel=0.01)


def test_no_report_of_an_honest_learner_is_cut_however_late_it_comes():
    """Hardware ten times as fast, reports that come late and together, outages in which it trains on."""
    for seed in range(200):
        rng = random.Random(seed)
        steps_s = USUAL.steps_s * rng.uniform(0.1, 8.0)
        account = Account(first_joined_at=0.0, heard_at=0.0)
        account.joined(0.0, 0.0, returning=False)
        now = 0.0
        for _ in range(200):
            now += rng.choice((0.05, 0.25, 0.25, 1.0, 60.0))
            told_at = max(0.0, now - rng.uniform(0.0, 1.0))
            steps = max(account.current.steps, int(told_at * steps_s))
            account.heard(now, Spent(steps=steps, tokens=100 * steps), RATES.most("fast"))
            assert (account.current.steps, account.current.tokens) == (steps, 100 * steps), seed


def test_what_was_not_counted_is_counted_when_time_allows_it():
    tokens, paid = counted(5000, 0, 1000.0, 0.0, 1.0)
    assert (tokens, paid) == (1000, 1.0)
    assert counted(5000, tokens, 1000.0, paid, 5.0)[0] == 5000


def test_most_of_the_others_say_what_is_plausible_and_liars_do_not_raise_each_other():
    assert Rates({}).most("alone") == Rates({"alone": USUAL}).most("alone") == Most(MOST_STEPS_S, MOST_TOKENS_S)
    liars = {"liar": Rate(1e3, 1e6), "other": Rate(1e3, 1e6)}
    rates = Rates({"a": USUAL, "b": USUAL, "c": USUAL, "d": USUAL} | liars)
    assert rates.usual("a") == USUAL
    assert rates.most("new") == Most(FASTER * 1.0, FASTER * 100.0)
    assert rates.most("liar") == rates.most("new"), "what it was let do before excuses nothing"


def test_tokens_are_held_back_while_others_are_about_to_train_and_all_count_afterwards():
    """The first of several to compile is honest: once another trains, nothing of its work was lost."""
    assert Rates({"first": USUAL}, {"b"}).most("first") == HELD
    assert Rates({}, {"first"}).most("first") == Most()
    account = Account(first_joined_at=0.0, heard_at=0.0)
    account.joined(0.0, 0.0, returning=False)
    for second in range(1, 61):
        account.heard(float(second), Spent(steps=second, tokens=100 * second), HELD)
        assert (account.current.steps, account.current.tokens) == (second, 0)
    assert account.balance(60.0).lost_s["thrown_away"] == 0.0
    slow = Rates({"first": USUAL, "b": Rate(0.2, 100.0)}).most("first")
    account.heard(61.0, Spent(steps=61, tokens=6100), slow)
    assert account.current.tokens == 6100


def early_liar(roster: Roster, core_restarts: bool) -> int:
    """Tokens that count of a liar that reports for 30 s before the others' first step, and for 30 s after that."""
    names = ("liar", "a", "b")
    for number, name in enumerate(names, 1):
        roster.join(name, "eu", number, 0, 0.0, b"", b"t", 0.0, 0.0)
    for tick in range(1, 240):
        now = tick / 4
        if core_restarts and tick == 150:
            older, roster = roster, Roster(4)
            roster.since = now
            for entry in older.entries.values():
                row = (entry.name, entry.region, entry.incarnation, entry.nonces, entry.account.as_data(), "")
                roster.restore(*row)
        for name in names:
            account = roster.entries[name].account
            steps = 4 * max(0, tick - 120)
            seen = Spent(steps=tick, tokens=1 << 50) if name == "liar" else Spent(steps=steps, tokens=10 * steps)
            account.heard(now, seen, roster.rates(now).most(name))
            account.step_time_s = 0.25 if name == "liar" else 1 / 16 if tick > 120 else None
            if name != "liar" and tick > 130:
                assert account.current.tokens == 10 * steps, "an honest one is not cut"
    return int(roster.entries["liar"].account.current.tokens)


@pytest.mark.parametrize("core_restarts", [False, True])
def test_a_liar_that_reports_before_the_others_first_step_counts_ten_times_one_of_them(core_restarts):
    assert 0 < early_liar(Roster(4), core_restarts) <= FASTER * 160 * 60


def test_learners_that_are_away_are_a_measure_for_an_hour_and_then_one_is_alone():
    roster = Roster(4)
    for number, name in enumerate(("here", "away"), 1):
        roster.join(name, "eu", number, 0, 0.0, b"", b"t", 0.0, 0.0)
        roster.entries[name].account.heard(10.0, Spent(steps=100, tokens=1000))
        roster.entries[name].account.step_time_s = 0.1
    assert roster.rates(3000.0).most("here") == Most(FASTER * 10.0, FASTER * 100.0)
    assert roster.rates(4000.0).most("here") == Most()
    roster.since = 3500.0
    assert roster.rates(4001.0).most("here").tokens_s == FASTER * 100.0, "a core that was away itself heard nothing"


def test_a_learner_that_joined_and_never_trains_holds_nothing_back_for_long():
    roster = Roster(4)
    for number, name in enumerate(("here", "stuck", "gone"), 1):
        roster.join(name, "eu", number, 0, 0.0, b"", b"t", 0.0, 0.0)
    with roster.entries["stuck"].stream(lambda _: None):
        assert roster.rates(100.0).most("here") == HELD
        assert roster.rates(4000.0).most("here") == Most()
    assert roster.rates(50.0).most("here") == HELD
    assert roster.rates(100.0).most("here") == Most(), "it is not connected"


def test_in_a_merge_a_learner_weighs_ten_times_most_of_the_others_at_most():
    weights = {"a": 100.0, "b": 100.0, "c": 30.0, "liar": 1e9}
    parts = parts_counted(weights)
    assert weights["liar"] * parts["liar"] == FASTER * 100.0
    assert [parts[name] for name in "abc"] == [1.0, 1.0, 1.0]
    assert parts_counted({"alone": 1e9}) == {"alone": 1.0}
    mixed = {"fast": 1000.0, "a": 100.0, "b": 100.0, "slow": 10.0}
    assert set(parts_counted(mixed).values()) == {1.0}


def test_what_a_liar_may_report_does_not_grow_with_what_it_reports():
    """It is silent for a while, and then what time allowed counts at once: it seems much faster than it is."""
    account, last = Account(first_joined_at=0.0, heard_at=0.0), 0.0
    account.joined(0.0, 0.0, returning=False)
    rates = Rates({"a": USUAL, "b": USUAL})
    for second in range(10, 210, 10):
        for now in (second, second + 0.25):
            account.heard(now, Spent(steps=1 << 40, tokens=1 << 50), rates.most("liar"))
            steps, tokens = account.current.steps, account.current.tokens
            seems = Rate((steps - last) / (now - second or 0.25), tokens / steps)
            last, rates = steps, Rates({"a": USUAL, "b": USUAL, "liar": seems})
    assert account.current.tokens <= FASTER * USUAL.tokens_s * 210 * 1.01


def test_reports_of_tokens_without_steps_weigh_as_the_tokens_that_time_allows():
    """A liar makes steps at the usual pace, and reports ten times the tokens: a weight is tokens x tokens / steps."""
    own = Rate(steps_s=1.0, batch=4000.0)
    hostile = weighed(Declared(1 << 50, 6), Declared(24_000, 6), 0, 0.25, own, USUAL)
    honest = USUAL.batch * 6
    assert hostile.steps == 6
    assert hostile.tokens <= FASTER * honest


def test_a_contribution_weighs_no_more_than_its_learner_reported_and_did_since():
    hostile = weighed(Declared(1 << 50, 1 << 40), Declared(0, 0), 0, 0.5, None, USUAL)
    assert hostile.steps <= 5
    assert hostile.tokens <= 500
    few = weighed(Declared(1 << 50, 1), Declared(1000, 10), 0, 0.0, USUAL, USUAL)
    assert few.tokens <= 1000, "the tokens of a step are those of a learner ten times as fast"
    spent = weighed(Declared(2400, 24), Declared(2400, 24), 2400, 0.0, USUAL, USUAL)
    assert spent.tokens <= 500, "what was given to this fragment is not given again"


def test_no_contribution_of_an_honest_learner_is_cut_though_it_overtakes_its_report():
    """Nine times the others' tokens per second, in as many more steps or in larger ones."""
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
                weighed(said, Declared(int(reported * own.batch), reported), given, now - heard_at, known, usual)
                == said
            )
            taken, given = done, given + said.tokens


def taken_up(roster: Roster) -> Roster:
    """As a core has it that starts again."""
    again = Roster(4)
    for entry in roster.entries.values():
        row = (entry.name, entry.region, entry.incarnation, entry.nonces, entry.account.as_data(), entry.evicted)
        again.restore(*row)
    return again


def test_tokens_of_an_evicted_liar_are_struck_for_good_and_schedules_follow():
    roster, learner = Roster(4), Counters()
    for name in ("honest", "liar"):
        roster.join(name, "eu", len(name), 0, 0.0, b"", b"t", 0.0, 0.0)
        roster.entries[name].account.heard(10.0, Spent(steps=10, tokens=1000))
    roster.entries["liar"].account.heard(20.0, Spent(steps=10, tokens=1 << 40))
    roster = taken_up(roster)
    liar = roster.entries["liar"]
    before = (roster.tokens(), roster.struck_tokens())
    learner.told(roster.tokens(), roster.struck_tokens())
    roster.evict(liar, "it lies", 30.0)
    roster.strike(liar, 500)
    learner.told(roster.tokens(), roster.struck_tokens())
    assert (roster.tokens(), learner.run_tokens) == (1500, 1500)
    assert [learner.run_tokens_after(1 << 40), learner.run_tokens_after(1600)] == [1500, 1600]
    learner.told(*before)
    assert learner.run_tokens == 1500, "what a merge tells that began before corrects nothing"
    again = taken_up(roster)
    assert (again.tokens(), again.struck_tokens()) == (1500, roster.struck_tokens())
    learner.told(1400, roster.struck_tokens())
    assert learner.run_tokens == 1500, "what a core forgot at its restart corrects nothing"


def test_tokens_that_a_restored_checkpoint_left_behind_do_not_count_and_the_sums_follow_each_report():
    roster, learner = Roster(4), Counters(tokens=1000)
    entry = roster.join("a", "eu", 1, 0, 0.0, b"", b"t", 0.0, 0.0)
    roster.heard(entry, 10.0, Spent(steps=10, tokens=1000))
    learner.told(roster.tokens(), roster.struck_tokens())
    entry.account.restored(400, 0.0)
    roster = taken_up(roster)
    assert (roster.tokens(), roster.struck_tokens()) == (400, 600)
    learner.told(roster.tokens(), roster.struck_tokens(), anew=True)
    assert (learner.run_tokens_after(1 << 40), learner.known_tokens()) == (400, 400)
    entry = roster.entries["a"]
    roster.heard(entry, 20.0, Spent(steps=12, tokens=1200))  # it trained on before it heard of the restore
    assert (roster.tokens(), roster.struck_tokens()) == (400, 800)
    roster.heard(entry, 30.0, Spent(steps=13, tokens=1300))
    assert (roster.tokens(), roster.struck_tokens()) == (500, 800)
    roster.strike(entry, 450)
    assert (roster.tokens(), roster.struck_tokens()) == (450, 850)
    assert roster.counted_tokens() == {"a": 450}
    assert taken_up(roster).tokens() == 450


def test_a_rate_is_plausible_beside_the_others_as_soon_as_the_first_of_them_is_known():
    roster = Roster(4)
    for name in ("honest", "liar"):
        roster.join(name, "eu", len(name), 0, 0.0, b"", b"t", 0.0, 0.0)
    assert roster.rates(1.0).most("liar") == HELD
    honest = roster.entries["honest"].account
    honest.heard(1.0, Spent(steps=10, tokens=1000))
    honest.step_time_s = 0.1
    assert roster.rates(1.01).most("liar") == Most(FASTER * 10.0, FASTER * 1000.0)
