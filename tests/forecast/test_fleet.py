"""A fleet in virtual time merges all trained work once, with any speeds, links and failures."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from atoll.fragments import exchange
from atoll_forecast.fleet import fleet as fleet_module
from atoll_forecast.fleet.fleet import Fleet
from atoll_forecast.fleet.learners import LearnerSpec
from atoll_forecast.fleet.schedule import Schedule
from atoll_server.quorum import Quorum
from atoll_server.rounds import syncer_events as ev
from atoll_server.settings import RunSettings
from hypothesis import given, settings
from hypothesis import strategies as st

FRAGMENTS = 6


def fleet(
    specs: list[LearnerSpec], seed: int = 0, overlap: float = math.inf, shards: int = 1, **run
) -> tuple[Fleet, Schedule]:
    chosen = RunSettings(inner_steps=12, **run)
    work = Schedule([1000.0] * FRAGMENTS, {spec.name: 1 for spec in specs})
    return Fleet(chosen, FRAGMENTS, specs, work, merge_s=0.01, overlap=overlap, seed=seed, shards=shards), work


def steps_of(made: Fleet) -> float:
    return sum(account.steps for account in made.accounts.values())


@given(
    speeds=st.lists(st.floats(0.3, 2.0), min_size=1, max_size=5),
    delay_s=st.floats(0, 0.4),
    jitter=st.sampled_from([0.0, 0.2]),
    share=st.floats(0.1, 1.0),
    seed=st.integers(0, 99),
    shards=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_trained_work_is_merged_once(speeds, delay_s, jitter, share, seed, shards):
    specs = [LearnerSpec(f"l{i}", 1 / v, delay_s=delay_s, jitter=jitter) for i, v in enumerate(speeds)]
    made, work = fleet(specs, seed, shards=shards, quorum=Quorum(share=share), max_staleness=1000)
    made.run(lambda fleet: fleet.now > 150)
    lost = steps_of(made) - work.merged_steps
    assert -1e-6 <= lost <= 5 * len(speeds)  # a leaving learner waits four steps for the fates of its work
    assert [effect.version for effect in made.merges if effect.fragment == 0] == list(
        range(1, 1 + sum(effect.fragment == 0 for effect in made.merges))
    )


def test_the_same_seed_gives_the_same_run_and_another_seed_another_run():
    specs = [LearnerSpec(f"l{i}", jitter=0.2, between_failures_s=60, repair_s=10) for i in range(3)]

    def story(seed: int) -> list[tuple[int, int, float]]:
        made, _ = fleet(specs, seed)
        made.run(lambda fleet: fleet.now > 200)
        return [(m.fragment, m.version, sum(share.weight for share in m.shares)) for m in made.merges]

    assert story(1) == story(1)
    assert story(1) != story(2)


def test_a_dying_learner_loses_only_unsent_work():
    specs = [LearnerSpec("steady"), LearnerSpec("mortal", between_failures_s=40, repair_s=10)]
    made, work = fleet(specs)
    made.run(lambda fleet: fleet.now > 400)
    mortal, steady = made.accounts["mortal"], made.accounts["steady"]
    deaths = mortal.down_s / 10
    assert deaths >= 4
    lost = steps_of(made) - work.merged_steps
    assert 0 < lost <= deaths * (12 + 4)  # work since its anchors, and contributions on their way
    assert steady.trained_s == pytest.approx(400, abs=8)


def test_a_slow_learner_answers_every_round_in_time():
    """A slow learner finds several rounds at a boundary. If it answered only one of them, it would be late forever."""
    specs = [LearnerSpec(f"l{i}", 1 / v, delay_s=0.05) for i, v in enumerate((0.5, 0.8, 1.2, 1.5))]
    made, _ = fleet(specs)
    made.run(lambda fleet: fleet.now > 300)
    assert not any(merge.refusals for merge in made.merges)
    shares = sum(len(merge.shares) for merge in made.merges) / len(made.merges)
    assert shares > 3.6
    slow = made.accounts["l0"].staleness
    assert sum(slow) / len(slow) < 0.3


def test_learners_that_wait_keep_the_slowest_ones_pace():
    specs = [LearnerSpec("slow", 1.7, delay_s=0.1), LearnerSpec("quick", delay_s=0.1)]
    waiting, _ = fleet(specs, overlap=0, quorum=Quorum(share=1.0), fragments=FRAGMENTS)
    waiting.run(lambda fleet: fleet.now > 300)
    assert waiting.accounts["quick"].blocked_s > 30
    free, _ = fleet(specs)
    free.run(lambda fleet: fleet.now > 300)
    assert free.accounts["quick"].blocked_s == 0
    assert free.accounts["quick"].trained_s == pytest.approx(300, abs=8)


def test_a_narrow_link_causes_staleness_but_no_waiting():
    specs = [
        LearnerSpec("near"),
        LearnerSpec("near too"),
        LearnerSpec("far", up_bits_s=8 * 1000 / 6.0),
    ]  # an upload takes six steps per fragment
    made, _ = fleet(specs)
    made.run(lambda fleet: fleet.now > 300)
    far, near = made.accounts["far"], made.accounts["near"]
    assert far.trained_s == pytest.approx(near.trained_s, abs=8)
    assert sum(far.staleness) / len(far.staleness) > sum(near.staleness) / len(near.staleness) + 0.3


def test_the_fleet_does_as_much_at_a_step_boundary_as_learners():
    assert fleet_module.PER_BOUNDARY == exchange.PER_BOUNDARY


def test_work_of_late_learners_is_merged():
    specs = [LearnerSpec("host"), LearnerSpec("guest", joins_at_s=100)]
    made, work = fleet(specs)
    made.run(lambda fleet: fleet.now > 200)
    assert made.accounts["guest"].trained_s == pytest.approx(100, abs=8)
    assert work.merged_steps == pytest.approx(steps_of(made))


def test_a_fleet_without_learners_raises_an_error():
    made, _ = fleet([LearnerSpec("alone", between_failures_s=5, repair_s=math.inf)])
    with pytest.raises(RuntimeError, match="every learner has left"):
        made.run(lambda fleet: fleet.now > 1e9)


def test_shards_merge_as_much_as_one_core_and_space_their_rounds_as_evenly():
    specs = [LearnerSpec(f"l{i}", jitter=0.05, delay_s=0.1) for i in range(3)]
    counts, gaps = [], []
    for shards in (1, 3):
        made, _ = fleet(specs, shards=shards)
        opened = list[float]()
        ask = made._carry_out

        def seen(effect, ask=ask, made=made, opened=opened):
            if isinstance(effect, ev.OpenRound):
                opened.append(made.now)
            ask(effect)

        made._carry_out = seen  # type: ignore[method-assign]
        made.run(lambda fleet: fleet.now > 300)
        counts.append(len(made.merges))
        late = [b - a for a, b in pairwise(at for at in opened if 50 < at < 290)]
        gaps.append(max(late) - min(late))
    assert counts[1] == pytest.approx(counts[0], rel=0.03)
    assert gaps[1] < gaps[0] + 0.5  # rounds are 2 steps apart
