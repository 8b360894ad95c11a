"""Slots keep the rounds of all shards evenly spaced, even while a shard is missing and after it returns."""

from __future__ import annotations

import itertools
import random

import pytest
from atoll_server.quorum import Quorum
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.pacing import Pacing, Position
from atoll_server.rounds.round_state import Phase, RoundState
from atoll_server.rounds.syncer import Syncer, rounds_in_flight
from atoll_server.settings import RunSettings

STEP_S, FRAGMENTS = 0.5, 24
RUN = RunSettings(inner_steps=24, overlap_steps=4.0, fragments=FRAGMENTS, quorum=Quorum(share=1.0), grace_ratio=0.0)


@pytest.mark.parametrize("counts", [[6, 6, 6, 6], [12, 12], [7, 6, 6, 5], [1, 23], [24]])
def test_every_slot_belongs_to_one_shard_and_each_shard_has_evenly_spaced_ones(counts):
    shards = [Pacing.of(counts, number, 4) for number in range(len(counts))]
    assert sorted(slot for each in shards for slot in each.slots) == list(range(24))
    for each, count in zip(shards, counts, strict=True):
        assert len(each.slots) == count
        gaps = [(b - a) % 24 or 24 for a, b in itertools.pairwise([*each.slots, each.slots[0]])]
        assert max(gaps) - min(gaps) <= 2 * (len(counts) - 1), gaps


@pytest.mark.parametrize(("counts", "wanted", "most"), [([6] * 4, 4, 4), ([3] * 8, 4, 8), ([12, 12], 5, 5)])
def test_shards_share_the_runs_rounds_in_flight_with_at_least_one_each(counts, wanted, most):
    assert sum(Pacing.of(counts, number, wanted).most for number in range(len(counts))) == most


def test_the_nearest_slot_may_be_before_or_after_and_in_the_next_cycle():
    pacing = Pacing(24, (0, 6, 12, 18), 1)
    here = Position(5.0, 100.0, 0.5)
    assert here.nearest(pacing, 100.0) == pytest.approx(100.5)
    assert here.nearest(pacing, 101.0) == pytest.approx(100.5)
    assert Position(23.5, 100.0, 0.5).nearest(pacing, 100.0) == pytest.approx(100.25)
    assert here.moved(24, 110.0, 1.0) == Position(1.0, 110.0, 1.0)


def openings(counts: list[int], *, slots: bool, away: tuple[float, float] = (0.0, 0.0)) -> list[tuple[float, int]]:
    """Returns (time, shard) of every opening in 120 s of a run, with answers after one second.

    away: the interval in which the last shard is missing.
    """
    rng = random.Random(1)
    wanted = rounds_in_flight(RUN, FRAGMENTS)
    shards = [
        Syncer(
            RUN,
            {index: RoundState(0) for index in range(count)},
            lambda *_: 1.0,
            pacing=Pacing.of(counts, number, wanted) if slots else None,
        )
        for number, count in enumerate(counts)
    ]
    begun = [rng.uniform(0.0, 0.4) for _ in counts]  # the shards learn of the learner at different times
    found, answers, seq = list[tuple[float, int]](), list[tuple[float, int, int, int]](), itertools.count(1)
    position = Position(0.0, 0.0, RUN.inner_steps / FRAGMENTS * STEP_S)
    joined = [False] * len(counts)
    for tick in range(int(120 / 0.05)):
        now = tick * 0.05
        for number, syncer in enumerate(shards):
            if now < begun[number] or (number == len(counts) - 1 and away[0] <= now < away[1]):
                continue
            effects = []
            if not joined[number]:
                joined[number] = True
                effects += syncer.on(ev.Joined("a", 1), now)
            if slots:
                syncer.position = position
            effects += syncer.on(ev.Reported("a", int(now / STEP_S), False), now)
            effects += syncer.on(ev.Ticked(), now)
            due = [each for each in answers if each[0] <= now and each[1] == number]
            answers = [each for each in answers if each not in due]
            for _, _, fragment, cycle in due:
                key = ev.ContributionKey("a", 1, fragment, next(seq))
                effects += syncer.on(ev.Contributed(key, cycle, syncer.fragments[fragment].version, 8, 8), now)
            while effects:
                effect = effects.pop(0)
                if isinstance(effect, ev.OpenRound):
                    found.append((now, number))
                    answers.append((now + 1.0, number, effect.fragment, effect.cycle))
                elif isinstance(effect, ev.Merge):
                    effects += syncer.on(ev.Merged(effect.fragment, effect.version), now)
    assert all(rounds.phase in Phase for syncer in shards for rounds in syncer.fragments.values())
    return found


def crowding(found: list[tuple[float, int]], since: float, until: float, window_s: float = 1.0) -> int:
    """Returns the largest number of openings within a window of one second, where two are due."""
    times = [at for at, _ in found if since <= at < until]
    return max(sum(at <= other < at + window_s for other in times) for at in times)


def test_with_slots_shards_open_rounds_as_evenly_as_one_shard():
    alone = openings([24], slots=False)
    apart, together = openings([6] * 4, slots=False), openings([6] * 4, slots=True)
    assert crowding(alone, 40, 120) <= 3
    assert crowding(apart, 40, 120) > crowding(together, 40, 120)
    assert crowding(together, 40, 120) <= 3
    counts = [len([at for at, _ in found if at >= 40]) for found in (alone, together)]
    assert abs(counts[0] - counts[1]) <= 4, "slots must not change the number of rounds"


def test_after_a_shard_was_away_its_rounds_return_to_their_slots():
    found = openings([6] * 4, slots=True, away=(50.0, 70.0))
    assert not [at for at, shard in found if shard == 3 and 50 <= at < 70]
    assert crowding(found, 51, 70) <= 3, "other shards must keep their slots"
    assert crowding(found, 71, 90) <= 5, "missed rounds may open at twice the pace"
    assert crowding(found, 95, 120) <= 3
