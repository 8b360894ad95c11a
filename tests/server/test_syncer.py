"""Rounds: when they open and close, which learners they wait for, and what they merge. The clock is simulated."""

from __future__ import annotations

import itertools

import pytest
from atoll_server.merging import merge
from atoll_server.quorum import Quorum
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.liveness import EXPECTED_S, LearnerLiveness, learner_state
from atoll_server.rounds.round_state import PendingContribution, Phase, RoundState
from atoll_server.rounds.syncer import LOOK_S, Syncer
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.settings import RunSettings
from atoll_wire.contract import LearnerState
from hypothesis import given, settings
from hypothesis import strategies as st

STEP_S = 1.0


def begun(fragments: int) -> dict[int, RoundState]:
    return {index: RoundState() for index in range(fragments)}


def a_contribution_waits() -> RoundState:
    """Returns the state after a restart at version 7, with a contribution to a closed round."""
    rounds = RoundState(version=7)
    rounds.resume(9, 0.0, {7: 7.0}, [(ContributionKey("a", 1, 0, 1), PendingContribution(9, 7, 100, 4))])
    return rounds


class World:
    """A syncer with learners that report once per step. The clock moves only on request."""

    def __init__(self, learners: dict[str, float], fragments: int = 2, **run) -> None:
        self.now = 100.0
        self.syncer = Syncer(RunSettings(inner_steps=4, overlap_steps=2.0, **run), begun(fragments), merge.weight)
        self.speeds, self.steps, self.seq = learners, dict.fromkeys(learners, 0), {}
        self.effects: list[ev.Effect] = []
        for name in learners:
            self.tell(ev.Joined(name, 1))
        for _ in range(3):
            self.step()

    def tell(self, event: ev.SyncerEvent) -> list[ev.Effect]:
        effects = self.syncer.on(event, self.now)
        self.effects += effects
        return effects

    def step(self, seconds: float = STEP_S, silent: tuple[str, ...] = ()) -> list[ev.Effect]:
        """Advances the time. Every learner that is not silent reports its steps."""
        self.now += seconds
        made: list[ev.Effect] = []
        for name, speed in self.speeds.items():
            if name not in silent:
                self.steps[name] += max(1, round(seconds / STEP_S * speed))
                made += self.tell(ev.Reported(name, self.steps[name], False))
        return made

    def open(self, fragment: int = 0) -> None:
        """Waits until a round of the fragment is open."""
        for _ in range(50):
            if self.syncer.fragments[fragment].phase is Phase.OPEN:
                return
            self.step(0.5)
            self.finish()
        raise AssertionError("no round opened")

    def contribute(
        self, learner: str, fragment: int = 0, cycle: int | None = None, base: int | None = None, tokens: int = 100
    ):
        rounds = self.syncer.fragments[fragment]
        self.seq[learner, fragment] = self.seq.get((learner, fragment), 0) + 1
        key = ContributionKey(learner, 1, fragment, self.seq[learner, fragment])
        cycle = rounds.cycle if cycle is None else cycle
        return self.tell(ev.Contributed(key, cycle, rounds.version if base is None else base, tokens, 4))

    def finish(self) -> None:
        """Reports that every requested merge is done."""
        for index, rounds in self.syncer.fragments.items():
            if rounds.phase is Phase.MERGING:
                self.tell(ev.Merged(index, rounds.version + 1))


def merges(effects: list[ev.Effect]) -> list[ev.Merge]:
    return [effect for effect in effects if isinstance(effect, ev.Merge)]


def test_a_round_closes_when_every_live_learner_has_answered():
    world = World({"a": 1, "b": 1})
    world.open()
    assert not merges(world.contribute("a"))
    (closed,) = merges(world.contribute("b"))
    assert closed.reason == "every live learner has answered"
    assert [share.key.learner for share in closed.shares] == ["a", "b"]
    assert sum(share.weight for share in closed.shares) == pytest.approx(1)


def test_a_decline_is_an_answer():
    world = World({"a": 1, "b": 1})
    world.open()
    world.contribute("a")
    rounds = world.syncer.fragments[0]
    assert not merges(world.tell(ev.Declined("b", 0, rounds.cycle - 1, "of another cycle")))
    assert merges(world.tell(ev.Declined("b", 0, rounds.cycle, "nothing trained")))


def test_quorum_starts_the_grace_window_and_its_end_closes_the_round():
    world = World({"a": 1, "b": 1, "c": 1}, quorum=Quorum(learners=2))
    world.open()
    world.contribute("a")
    assert "1 of 2" in world.syncer.why(0, world.now)
    assert not merges(world.contribute("b"))
    assert "in the grace window, waiting for c" in world.syncer.why(0, world.now)
    grace = world.syncer.grace_s(world.syncer.present(world.now))
    assert 0 < grace <= 0.8 * 2 * STEP_S
    world.now += grace + 1e-6
    (closed,) = merges(world.tell(ev.Ticked()))
    assert closed.reason == "the quorum answered, and the grace window passed without c"
    assert len(closed.shares) == 2


def test_grace_follows_equation_3_and_is_never_negative():
    world = World({"a": 1, "b": 1})
    syncer = world.syncer
    syncer.quorum_s, syncer.sync_s = 0.5, 0.25
    step = syncer.present(world.now).fastest_step_s
    assert syncer.grace_s(syncer.present(world.now)) == pytest.approx(0.8 * (2 * step - 0.75))
    syncer.sync_s = 60.0
    assert syncer.grace_s(syncer.present(world.now)) == 0.0


def test_a_learner_that_fell_silent_is_not_waited_for():
    world = World({"a": 1, "b": 1})
    world.open()
    world.contribute("a")
    for _ in range(12):
        if world.finish() or merges(world.effects):
            break
        world.step(silent=("b",))
    (closed, *_) = merges(world.effects)
    assert [share.key.learner for share in closed.shares] == ["a"]


def test_a_round_without_contributions_lapses_and_the_version_stays():
    world = World({"a": 1, "b": 1})
    world.open()
    rounds = world.syncer.fragments[0]
    cycle = rounds.cycle
    world.tell(ev.Declined("a", 0, cycle, "nothing trained"))
    effects = world.tell(ev.Declined("b", 0, cycle, "nothing trained"))
    assert [e.cycle for e in effects if isinstance(e, ev.Lapse)] == [cycle]
    assert (rounds.version, rounds.cycle) == (0, cycle)
    world.open()
    assert rounds.cycle == cycle + 1


def test_a_late_contribution_joins_the_next_round_but_neither_makes_a_quorum_nor_starts_the_grace():
    world = World({"a": 1, "b": 1, "c": 1}, quorum=Quorum(learners=1))
    world.open()
    first = world.syncer.fragments[0].cycle
    world.contribute("a")
    world.now += 2.0
    world.tell(ev.Ticked())
    world.finish()
    world.contribute("b", cycle=first, base=0)
    world.open()
    assert world.syncer.fragments[0].quorum_at is None
    assert "b" not in world.syncer.why(0, world.now).split("waiting for")[1]
    world.contribute("a")
    (*_, closed) = merges(world.contribute("c"))
    late = next(share for share in closed.shares if share.key.learner == "b")
    assert late.staleness == pytest.approx(1 / 3), "a third of an outer step has passed since its base"
    on_time = next(share for share in closed.shares if share.key.learner == "a")
    assert late.weight == pytest.approx(on_time.weight)


def test_a_merge_of_few_learners_is_a_small_step():
    world = World({"a": 1, "b": 1, "c": 1}, quorum=Quorum(learners=1), grace_ratio=1e-9)
    world.open()
    world.contribute("a")
    world.now += 0.001
    (alone,) = merges(world.tell(ev.Ticked()))
    assert [share.weight for share in alone.shares] == [pytest.approx(1 / 3)]  # others are assumed equal
    assert alone.age == pytest.approx(1 / 3)
    world.finish()
    first = world.syncer.fragments[0].cycle
    world.contribute("b", cycle=first, base=0)
    assert not merges(world.contribute("c", cycle=first, base=0)), "late work must wait for a round"
    world.open()
    (late,) = merges(world.contribute("a"))
    assert [share.staleness for share in late.shares] == pytest.approx([0.0, 1 / 3, 1 / 3])
    assert sum(share.weight for share in late.shares) == pytest.approx(1), "a partial step is no discount"
    assert late.age == pytest.approx(4 / 3)
    world.finish()
    world.contribute("a", cycle=first, base=0)
    world.open()
    world.contribute("b")
    (late,) = merges(world.contribute("c"))
    assert [share.staleness for share in late.shares] == pytest.approx([4 / 3, 0.0, 0.0])
    assert sum(share.weight for share in late.shares) == pytest.approx((2 + (4 / 3) ** -0.5) / 3)


def test_without_a_grace_window_late_work_is_merged_as_soon_as_it_has_a_quorum():
    world = World({"a": 1, "b": 1, "c": 1, "d": 1}, quorum=Quorum(learners=2), grace_ratio=0.0)
    world.open()
    opened = world.syncer.fragments[0].opened_at
    first = world.syncer.fragments[0].cycle
    world.contribute("a")
    assert merges(world.contribute("b"))
    assert not world.contribute("c", cycle=first, base=0), "a fragment must have one merge at a time"
    world.finish()
    (late,) = merges(world.contribute("d", cycle=first, base=0))
    assert (late.cause, [share.key.learner for share in late.shares]) == (ev.Cause.LATE, ["c", "d"])
    assert (late.version, late.cycle) == (2, first + 1)
    assert world.syncer.fragments[0].opened_at == opened, "late merges must not shift the next round"
    assert not [e for e in world.effects if isinstance(e, ev.OpenRound) and e.fragment == 0 and e.cycle == late.cycle]


def test_late_contributions_during_a_merge_are_merged_after_it():
    world = World({"a": 1, "b": 1}, quorum=Quorum(learners=1), grace_ratio=0.0)
    world.open()
    first = world.syncer.fragments[0].cycle
    world.contribute("a")
    assert not merges(world.contribute("b", cycle=first, base=0))
    (late,) = merges(world.tell(ev.Merged(0, 1)))
    assert [share.key.learner for share in late.shares] == ["b"]


def late_world(*names: str, **run) -> tuple[World, int]:
    """Returns a world in which one learner's work is merged, and the others are late for that cycle."""
    world = World(dict.fromkeys(names, 1), grace_ratio=0.0, **run)
    world.open()
    first = world.syncer.fragments[0].cycle
    world.contribute(names[0])
    world.finish()
    return world, first


def test_a_learner_that_pauses_before_its_late_work_arrives_counts_like_the_others():
    world, first = late_world("a", "b", "c", "d", quorum=Quorum(learners=1))
    for name in "abcd":
        world.tell(ev.Reported(name, world.steps[name], True))
    parts = [sum(share.weight for share in merge.shares) for merge in merges(world.effects)]
    for name in "bcd":
        (late,) = merges(world.contribute(name, cycle=first, base=0))
        parts.append(sum(share.weight for share in late.shares))
        world.finish()
    assert parts == pytest.approx([0.25] * 4)


@pytest.mark.parametrize("cycle", ["of a round", "of a good-bye"])
def test_late_work_is_not_merged_alone_during_a_pause_or_a_leave(cycle):
    world, first = late_world("a", "b", quorum=Quorum(learners=1))
    if cycle == "of a round":
        world.tell(ev.Paused(True))
        assert not merges(world.contribute("b", cycle=first, base=0))
        world.tell(ev.Paused(False))
    else:
        assert not merges(world.contribute("b", cycle=0, base=0))
        world.tell(ev.Left("a"))
        assert merges(world.effects)[-1].cause is not ev.Cause.LEFT
        world.tell(ev.Left("b"))
    (*_, last) = merges(world.effects)
    assert last.cause is (ev.Cause.LATE if cycle == "of a round" else ev.Cause.LEFT)


def test_after_a_restart_late_work_waits_for_learners_even_without_a_grace_window():
    syncer = Syncer(
        RunSettings(inner_steps=4, grace_ratio=0.0, quorum=Quorum(learners=3)),
        {0: a_contribution_waits()},
        merge.weight,
    )
    syncer.restore({"a": LearnerLiveness(1, 5.0, 5.0)})
    assert not syncer.on(ev.Ticked(), 5.0)


def test_a_late_answer_updates_a_learners_usual_time():
    world, first = late_world("a", "b", "c", quorum=Quorum(learners=1))
    took = world.now - world.syncer.fragments[0].opened_at
    for name, seconds in (("b", 1.0), ("c", 2.0)):
        world.now += seconds
        world.contribute(name, cycle=first, base=0)
        world.finish()
    answers = [world.syncer.liveness[name].answer_s for name in "bc"]
    assert answers == pytest.approx([took + 1.0, took + 3.0])


@pytest.mark.parametrize("cycle", [0, 9])
def test_an_answer_after_a_restart_does_not_measure_its_learner(cycle):
    """The time since the last merge includes the restart. Without a merge, it begins in 1970."""
    world = World({"a": 1, "b": 1}, quorum=Quorum(learners=2))
    world.syncer.fragments[0].resume(cycle, -1.8e9, {0: 0.0}, [])
    world.contribute("a", cycle=cycle, base=0)
    assert world.syncer.liveness["a"].answer_s is None
    world.finish()
    world.open()
    opened = world.syncer.fragments[0].opened_at
    world.contribute("b")
    while world.syncer.fragments[0].phase is Phase.OPEN:
        world.step(0.5)
        assert world.now < opened + 30, "the round waits too long for a"


def test_ages_are_kept_as_long_as_their_work_may_be_merged():
    rounds = RoundState()
    run = RunSettings(staleness_exponent=0.0, max_staleness=4)
    for _ in range(3000):
        rounds.pending[ContributionKey("a", 0, 0, rounds.version)] = PendingContribution(0, rounds.version, 10, 1)
        rounds.settle({str(number) for number in range(299)} | {"a"}, merge.weight, run)
        rounds.version += 1
    assert rounds.staleness(rounds.version - 1200) == 4.0
    assert len(rounds.ages) == pytest.approx(5 * 300, abs=3)


def test_the_age_of_a_version_counts_outer_steps_and_not_merges():
    rounds = RoundState()
    for _ in range(4):
        rounds.pending[ContributionKey("a", 0, 0, rounds.version)] = PendingContribution(0, rounds.version, 10, 1)
        rounds.settle({"a", "b", "c", "d"}, merge.weight, RunSettings(staleness_exponent=0.0))
        rounds.version += 1
    assert [rounds.age(version) for version in range(5)] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert rounds.staleness(2) == pytest.approx(0.5)
    rounds.version, rounds.ages = 100, {99: 30.0, 100: 30.5}
    assert rounds.staleness(97) == 2.5, "forgotten versions must count as whole outer steps"


def test_a_learner_that_declines_is_not_missing():
    rounds = RoundState(version=4, cycle=9, usual={"a": 100.0, "b": 100.0}, declined={"b": "refused"})
    rounds.pending[ContributionKey("a", 0, 0, 1)] = PendingContribution(9, 4, 10, 1)
    shares, _ = rounds.settle({"a", "b"}, merge.weight, RunSettings())
    assert [share.weight for share in shares] == [1.0]


def test_a_paused_learner_is_not_part_of_a_merge():
    world = World({"a": 1, "b": 1})
    world.tell(ev.Reported("b", world.steps["b"], True))
    present = world.syncer.present(world.now)
    assert (present.live, present.counted) == ({"a", "b"}, {"a"})


def test_a_round_waits_some_time_for_a_learner_that_woke_before_its_first_step():
    """After a cut, its reports arrived late and together. A seed found a round that closed without it."""
    woken = LearnerLiveness(1, joined_at=0.0, heard_at=0.5, report_interval_s=0.5)
    woken.hear(0, False, 60.0)
    assert (woken.live(60.0), woken.expected(60.0)) == (True, True)
    assert (woken.live(60.0 + EXPECTED_S + 1), woken.expected(60.0 + EXPECTED_S + 1)) == (False, False)
    woken.gone = True
    assert not woken.live(60.0)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.3, 1.0, 9.0, 15.0, 60.0]), st.integers(0, 3), st.booleans()),
        max_size=12,
    ),
    st.floats(0.0, 120.0),
    st.booleans(),
)
def test_a_learner_that_rounds_wait_for_may_still_contribute(reports, after_s, leaves):
    observed, now, steps = LearnerLiveness(1, 0.0, 0.0), 0.0, 0
    for gap_s, grown, paused in reports:
        now, steps = now + gap_s, steps + grown
        observed.hear(steps, paused, now)
    observed.gone = leaves
    assert observed.expected(now + after_s) or not observed.live(now + after_s)


def test_after_a_silence_of_all_a_single_contribution_is_a_part_of_a_step():
    world = World({"a": 1, "b": 1})
    world.open()
    world.contribute("a")
    world.now += 60.0
    (silent,) = merges(world.tell(ev.Ticked()))
    assert silent.cause is ev.Cause.ALL_SILENT
    assert [share.weight for share in silent.shares] == [0.5]


def test_after_all_learners_left_only_their_contributions_count():
    world = World({"a": 1, "b": 1})
    world.open()
    world.contribute("a")
    world.tell(ev.Left("a"))
    (last,) = merges(world.tell(ev.Left("b")))
    assert last.cause is ev.Cause.LEFT
    assert [share.weight for share in last.shares] == [1.0]


def test_a_missing_learner_counts_at_most_like_the_largest_present_one():
    rounds = RoundState(version=4, cycle=9, usual={"a": 5.0, "b": 1000.0, "gone": 50.0})
    rounds.pending[ev.ContributionKey("a", 0, 0, 1)] = PendingContribution(9, 4, 10, 1)
    shares, refusals = rounds.settle({"a", "b"}, merge.weight, RunSettings())
    assert [share.weight for share in shares] == [0.5]
    assert (refusals, rounds.pending, rounds.usual["a"]) == ((), {}, 100.0)


def test_beyond_the_maximum_staleness_a_contribution_is_refused_and_its_work_dropped():
    world = World({"a": 1, "b": 1}, max_staleness=1)
    world.syncer.fragments[0].version = 5
    world.open()
    world.contribute("a", base=3)
    (closed,) = merges(world.contribute("b", base=4))
    assert [refusal.key.learner for refusal in closed.refusals] == ["a"]
    assert closed.refusals[0].drop
    assert "staleness 2 is above the limit 1" in closed.refusals[0].reason
    assert [share.key.learner for share in closed.shares] == ["b"]


def test_a_deadline_derived_from_usual_answers_ends_a_round_without_a_quorum():
    world = World({"a": 1, "b": 1, "c": 1}, quorum=Quorum(learners=3))
    for _ in range(4):  # all answer immediately, which becomes the usual time
        world.open()
        for name in "abc":
            world.contribute(name)
        world.finish()
    world.open()
    world.contribute("a")
    opened = world.syncer.fragments[0].opened_at
    while not (closed := [m for m in merges(world.effects) if "deadline" in m.reason]):
        world.step(0.5)
        assert world.now < opened + 30, "the deadline must end the round"
    assert "deadline passed without b, c" in closed[0].reason
    assert world.now - opened == pytest.approx(4 * STEP_S, abs=1.6)


def test_an_upload_whose_frames_keep_arriving_is_waited_for():
    world = World({"a": 1, "b": 1}, quorum=Quorum(learners=2))
    for _ in range(3):
        world.open()
        world.contribute("a")
        world.contribute("b")
        world.finish()
    world.open()
    before = len(merges(world.effects))
    world.contribute("a")
    for _ in range(15):
        world.step(1.0)
        world.syncer.uploading("b", 0, world.now)
    assert len(merges(world.effects)) == before
    world.contribute("b")
    assert len(merges(world.effects)) == before + 1


def test_the_pace_is_one_round_of_each_fragment_in_h_steps_of_the_fastest():
    world = World({"slow": 1, "fast": 2}, fragments=4)
    opened: list[float] = []
    for _ in range(800):
        world.now += 0.05
        for name, every in (("slow", 20), ("fast", 10)):
            if round(world.now / 0.05) % every == 0:
                world.steps[name] += 1
                world.tell(ev.Reported(name, world.steps[name], False))
        effects = world.tell(ev.Ticked())
        opened += [world.now] * sum(isinstance(effect, ev.OpenRound) for effect in effects)
        for index, rounds in world.syncer.fragments.items():
            if rounds.phase is Phase.OPEN:
                world.contribute("slow", index)
                world.contribute("fast", index)
        world.finish()
    late = [time for time in opened if time > 120]
    assert (late[-1] - late[0]) / (len(late) - 1) == pytest.approx(4 / 4 * 0.5, rel=0.15)


def test_missed_rounds_open_at_twice_the_pace_after_an_outage():
    world = World({"a": 1}, fragments=4)
    began, world.now = world.now, world.now + 3.0
    synced_at = [began - 1.0, began, began - 3.0, began - 2.0]
    left = {index: RoundState(version=5) for index in range(4)}
    for index, at in enumerate(synced_at):
        left[index].resume(5, at, {5: 5.0}, [])
    world.syncer = Syncer(RunSettings(inner_steps=4), left, merge.weight)
    world.syncer.restore({"a": LearnerLiveness(1, world.now, world.now)})
    opened: list[tuple[float, int]] = []
    for tick in range(400):
        world.now += 0.05
        world.steps["a"] += tick % 20 == 0
        seen = len(world.effects)
        world.tell(ev.Reported("a", world.steps["a"], False))
        for effect in [effect for effect in world.effects[seen:] if isinstance(effect, ev.OpenRound)]:
            opened.append((world.now, effect.fragment))
            world.contribute("a", effect.fragment)
        world.finish()
    assert [fragment for _, fragment in opened[:8]] == [2, 3, 0, 1, 2, 3, 0, 1], "most overdue first"
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(opened)]
    interval = 4 / 4 * 1.0
    assert gaps[:3] == pytest.approx([interval / 2] * 3, abs=0.11)
    assert gaps[-5:] == pytest.approx([interval] * 5, abs=0.11)
    owed = 4  # at most one round per fragment, however long the outage was
    assert len(opened) == pytest.approx(opened[-1][0] - opened[0][0] + owed, abs=1.5)


@pytest.mark.parametrize(("overlap", "fragments", "most"), [(2, 24, 12), (2, 2, 1), (0.1, 24, 1), (1000, 3, 3)])
def test_the_number_of_rounds_in_flight_is_limited(overlap, fragments, most):
    syncer = Syncer(RunSettings(inner_steps=4, overlap_steps=overlap), begun(fragments), merge.weight)
    assert syncer.most_in_flight() == most


def test_after_all_learners_left_pending_work_is_merged_immediately():
    world = World({"a": 1, "b": 1})
    world.open()
    world.contribute("a", fragment=1)
    world.tell(ev.Left("a"))
    effects = world.tell(ev.Left("b"))
    assert [merge.fragment for merge in merges(effects)] == [1]


def test_after_a_restart_pending_contributions_wait_for_learners():
    syncer = Syncer(RunSettings(inner_steps=4), {0: a_contribution_waits()}, merge.weight)
    syncer.restore({})
    assert not syncer.on(ev.Joined("a", 1), 50.0)
    assert not syncer.on(ev.Ticked(), 55.0)
    (opened, closed) = syncer.on(ev.Ticked(), 61.0)
    assert isinstance(opened, ev.OpenRound)
    assert isinstance(closed, ev.Merge)
    assert (closed.version, closed.cycle) == (8, 10)


def test_after_a_restart_pending_work_of_departed_learners_is_merged_at_the_first_event():
    syncer = Syncer(RunSettings(inner_steps=4), {0: a_contribution_waits()}, merge.weight)
    syncer.restore({"a": LearnerLiveness(1, 50.0, 50.0, gone=True)})
    (_, closed) = syncer.on(ev.Ticked(), 50.0)
    assert isinstance(closed, ev.Merge)


def test_a_learner_that_reports_but_no_longer_trains_does_not_delay_pending_work():
    world = World({"a": 1, "b": 1})
    world.open()
    world.contribute("a", fragment=1)
    merged = []
    for _ in range(40):
        world.now += 0.5
        merged += [merge.fragment for merge in merges(world.tell(ev.Reported("a", world.steps["a"], False)))]
        merged += [merge.fragment for merge in merges(world.tell(ev.Reported("b", world.steps["b"], False)))]
    assert 1 in merged


def test_a_paused_learner_counts_as_live_while_it_reports():
    world = World({"a": 1, "b": 1})
    world.tell(ev.Reported("b", world.steps["b"], True))
    for _ in range(10):
        world.now += STEP_S
        world.steps["a"] += 1
        world.tell(ev.Reported("a", world.steps["a"], False))
        world.tell(ev.Reported("b", world.steps["b"], True))
    assert world.syncer.present(world.now).live == {"a", "b"}


def test_a_learner_that_waits_before_its_first_step_does_not_delay_pending_work():
    """It may wait for data units whose work is pending: neither could go on (benchmarks/failures/data_units.py)."""
    world = World({"a": 1})
    world.open()
    world.contribute("a", fragment=1)
    world.tell(ev.Joined("b", 1))
    world.tell(ev.Left("a"))
    merged = []
    for _ in range(40):
        world.now += 0.5
        merged += [merge.fragment for merge in merges(world.tell(ev.Reported("b", 0, True)))]
    assert merged == [1]


def test_a_pause_does_not_count_as_step_time():
    world = World({"a": 1})
    world.tell(ev.Reported("a", world.steps["a"], True))
    world.now += 60
    world.steps["a"] += 1
    world.tell(ev.Reported("a", world.steps["a"], False))
    assert world.syncer.present(world.now).fastest_step_s == pytest.approx(STEP_S)


def test_an_unknown_learner_may_leave():
    syncer = Syncer(RunSettings(inner_steps=4), begun(1), merge.weight)
    assert not syncer.on(ev.Left("evicted before the run had parameters", "evicted: test"), 1.0)


def test_an_evicted_learners_work_in_transit_is_refused_once_durable():
    world = World({"a": 1, "b": 1})
    world.open()
    world.tell(ev.Left("a", "evicted: test"))
    (refuse, *_) = world.contribute("a")
    assert isinstance(refuse, ev.Refuse)
    assert [refusal.key.learner for refusal in refuse.refusals] == ["a"]
    world.tell(ev.Joined("a", 1))
    assert not any(isinstance(effect, ev.Refuse) for effect in world.contribute("a"))


def test_quorum_is_a_number_or_a_share():
    assert [Quorum().of(n) for n in (0, 1, 2, 3, 4, 8)] == [1, 1, 1, 2, 2, 4]
    assert Quorum.parse("3").of(2) == 2
    assert Quorum.parse("3").of(5) == 3
    assert Quorum.parse("75%").of(8) == 6
    assert Quorum.parse("1.0").of(5) == 5


moves = st.lists(
    st.tuples(st.sampled_from(["step", "contribute", "decline", "late", "stale", "finish", "leave", "upload"]),
              st.sampled_from("abc"), st.integers(0, 2), st.floats(0.01, 8)),
    min_size=20, max_size=120,
)  # fmt: skip


@given(moves=moves)
@settings(max_examples=150, deadline=None)
def test_versions_always_grow_by_one_and_each_contribution_has_one_fate(moves):
    world = World({"a": 1, "b": 1.5, "c": 0.5}, fragments=3, max_staleness=2)
    fates: dict[ContributionKey, int] = {}
    given: set[ContributionKey] = set()
    waiting: dict[tuple[str, int], ContributionKey] = {}
    seen = 0
    for what, learner, fragment, seconds in moves:
        rounds = world.syncer.fragments[fragment]
        if what == "step":
            world.step(seconds)
        elif what in {"contribute", "late", "stale"} and (learner, fragment) not in waiting:
            back = {"contribute": 0, "late": 1, "stale": 4}[what]
            world.contribute(learner, fragment, max(0, rounds.cycle - back), max(0, rounds.version - back))
            waiting[learner, fragment] = key = ContributionKey(learner, 1, fragment, world.seq[learner, fragment])
            given.add(key)
        elif what == "decline":
            world.tell(ev.Declined(learner, fragment, rounds.cycle, "test"))
        elif what == "upload":
            world.syncer.uploading(learner, fragment, world.now)
        elif what == "leave":
            world.tell(ev.Left(learner))
            world.tell(ev.Joined(learner, 1))
        world.finish()
        for effect in world.effects[seen:]:
            if isinstance(effect, ev.Merge):
                assert [share.key for share in effect.shares] == sorted(share.key for share in effect.shares)
                assert all(share.staleness <= 2 for share in effect.shares)
            if isinstance(effect, ev.Merge | ev.Refuse):
                ended = [refusal.key for refusal in effect.refusals]
                ended += [share.key for share in effect.shares] if isinstance(effect, ev.Merge) else []
                for key in ended:
                    fates[key] = fates.get(key, 0) + 1
                    waiting.pop((key.learner, key.fragment), None)
        seen = len(world.effects)
        in_flight = sum(r.phase is not Phase.IDLE for r in world.syncer.fragments.values())
        assert in_flight <= max(
            world.syncer.most_in_flight(), sum(bool(r.pending) for r in world.syncer.fragments.values())
        )
    assert set(fates) <= given
    assert set(fates.values()) <= {1}
    pending = {key for rounds in world.syncer.fragments.values() for key in rounds.pending}
    assert pending | set(fates) == given
    for name in "abc":
        world.tell(ev.Left(name))
    for _ in range(4):
        world.finish()
        world.tell(ev.Ticked())
    assert not any(rounds.pending for rounds in world.syncer.fragments.values()), "nothing may stay"


def heard(observed: LearnerLiveness, step_s: float, seconds: float, every_s: float = 0.25) -> float | None:
    """Simulates a learner whose reports and steps have different times."""
    for report in range(1, int(seconds / every_s) + 1):
        observed.hear(int(report * every_s / step_s), False, 50.0 + report * every_s)
    return observed.step_time_s


def test_a_step_time_is_correct_within_a_few_steps_for_reports_at_any_time():
    for seconds in (2.0, 3.0, 5.0, 20.0):
        assert heard(LearnerLiveness(1, 50.0, 50.0), 0.2, seconds) == pytest.approx(0.2, rel=0.15)


def test_a_remembered_step_time_counts_until_enough_steps_are_measured():
    assert heard(LearnerLiveness(1, 50.0, 50.0, step_time_s=0.3, remembered=True), 0.2, 1.0) == 0.3
    assert heard(LearnerLiveness(1, 50.0, 50.0, step_time_s=0.3, remembered=True), 0.2, 10.0) == pytest.approx(
        0.2, rel=0.2
    )
    observed = LearnerLiveness(1, 50.0, 50.0, step_time_s=0.3, remembered=True)
    observed.hear(1000, False, 50.3)
    assert observed.live(50.4), "one report must suffice for a known learner"


def test_with_many_learners_only_some_reports_are_evaluated_but_rounds_still_open():
    world = World({f"l{number:03}": 1 for number in range(500)})
    looks = set[float]()
    for _ in range(8):
        for name in world.speeds:
            world.now += STEP_S / len(world.speeds)
            world.steps[name] += 1
            world.tell(ev.Reported(name, world.steps[name], False))
            looks.add(world.syncer.looked_at)
            world.finish()
    assert 4 * len(looks) < 8 * len(world.speeds)
    opened = [effect for effect in world.effects if isinstance(effect, ev.OpenRound)]
    assert opened, "a round must open after 4 steps"
    looked_at, world.now = world.syncer.looked_at, world.syncer.looked_at + 1e-6
    closed = [merges(world.contribute(name, opened[0].fragment, opened[0].cycle)) for name in world.speeds]
    assert world.syncer.looked_at == looked_at, "a contribution concerns only one fragment"
    assert any(closed), "the round must close at its last contribution"


def test_contributions_to_one_fragment_do_not_delay_the_decisions_about_others():
    world = World({"a": 1, "b": 1}, fragments=4)
    world.open(0)
    world.now += STEP_S
    for number in range(1000):
        world.now += 0.01
        world.contribute("a", 0)
        if number % 10 == 0:
            assert world.now - world.syncer.looked_at <= LOOK_S + 0.01
    assert world.syncer.next_wake_for(0, world.now) is not None


def test_a_round_that_lapses_makes_room_for_another_at_once():
    world = World({"a": 1}, fragments=2)
    world.open(0)
    while world.syncer.due_at is None or world.now < world.syncer.due_at + 4 * STEP_S:
        world.now += STEP_S / 2  # the next round is due, but only one may be in flight
    (lapse, opened) = world.tell(ev.Declined("a", 0, world.syncer.fragments[0].cycle, "nothing trained"))
    assert isinstance(lapse, ev.Lapse)
    assert isinstance(opened, ev.OpenRound)


def test_a_pause_of_the_run_never_counts_as_step_time():
    """Reports without new steps come after the resume, too.

    A learner that joined during the pause has no step time yet.
    """
    for known_before in (True, False):
        syncer = Syncer(RunSettings(inner_steps=4, overlap_steps=4), begun(4), lambda *_: 1.0)
        now = 0.0
        for name in ("a", "b"):
            syncer.on(ev.Joined(name, 1), now)
        steps = 0
        for _ in range(40 if known_before else 1):
            now, steps = now + 1.0, steps + 1
            for name in ("a", "b"):
                syncer.on(ev.Reported(name, steps, False), now)
        syncer.on(ev.Paused(True), now)
        for _ in range(600):
            now += 1.0
            for name in ("a", "b"):
                syncer.on(ev.Reported(name, steps, True), now)
        syncer.on(ev.Paused(False), now)
        opened = 0
        for tick in range(240):
            now += 0.5
            steps += tick % 2  # every other report has no new steps
            for name in ("a", "b"):
                effects = syncer.on(ev.Reported(name, steps, False), now)
                opened += sum(isinstance(effect, ev.OpenRound) for effect in effects)
                for effect in effects:
                    if isinstance(effect, ev.OpenRound):
                        for who in ("a", "b"):
                            key = ContributionKey(who, 1, effect.fragment, effect.cycle)
                            version = syncer.fragments[effect.fragment].version
                            for merge in syncer.on(ev.Contributed(key, effect.cycle, version, 10, 4), now):
                                if isinstance(merge, ev.Merge):
                                    syncer.on(ev.Merged(merge.fragment, merge.version), now)
        assert all(0.5 < observed.step_time_s < 2.5 for observed in syncer.liveness.values()), known_before
        assert opened > 60, (known_before, opened)


def test_a_learner_that_died_during_a_pause_stays_dead_after_it():
    syncer, now = Syncer(RunSettings(), begun(2), lambda *_: 1.0), 0.0
    for name in ("a", "b"):
        syncer.on(ev.Joined(name, 1), now)
    for step in range(1, 20):
        now += 1.0
        for name in ("a", "b"):
            syncer.on(ev.Reported(name, step, False), now)
    syncer.on(ev.Paused(True), now)
    for second in range(60):
        now += 1.0
        for name in ("a", "b") if second < 5 else ("a",):
            syncer.on(ev.Reported(name, 19, True), now)
    syncer.on(ev.Paused(False), now)
    syncer.on(ev.Reported("a", 19, False), now + 0.5)
    assert syncer.present(now + 0.6).live == {"a"}
    assert learner_state(syncer.liveness["b"], now + 0.6, evicted=False) is LearnerState.SILENT


def test_a_repeated_pause_changes_nothing():
    syncer = Syncer(RunSettings(), begun(2), lambda *_: 1.0)
    syncer.due_at = 5.0
    syncer.on(ev.Paused(False), 10.0)
    assert syncer.due_at == 5.0, "missed rounds must still be caught up"


def second_by_second(syncer: Syncer, now: float, until: float, steps: dict[str, int]) -> list[float]:
    """Each learner steps every two seconds and reports once per second. Returns the times of merges."""
    merged = []
    while now < until:
        now += 1.0
        for name, made in list(steps.items()):
            steps[name] = made + (now % 2 == 0)
            effects = syncer.on(ev.Reported(name, steps[name], False), now)
            while effects:
                effect = effects.pop(0)
                if isinstance(effect, ev.OpenRound):
                    for who in steps:
                        key = ContributionKey(who, 1, effect.fragment, effect.cycle)
                        version = syncer.fragments[effect.fragment].version
                        effects += syncer.on(ev.Contributed(key, effect.cycle, version, 10, 4), now)
                elif isinstance(effect, ev.Merge):
                    merged.append(now)
                    effects += syncer.on(ev.Merged(effect.fragment, effect.version), now)
        syncer.on(ev.Ticked(), now)
    return merged


def test_a_majority_that_wakes_from_an_hours_freeze_and_dies_delays_no_round():
    """The frozen hour must not change step times, answers or reports."""
    syncer, steps = Syncer(RunSettings(inner_steps=24), begun(8), lambda *_: 1.0), dict.fromkeys("abc", 0)
    for name in steps:
        syncer.on(ev.Joined(name, 1), 0.0)
    assert second_by_second(syncer, 0.0, 1800.0, steps)
    alone = {"a": steps["a"]}
    assert second_by_second(syncer, 1800.0, 5400.0, alone)[-1] > 5380, "one learner must continue alone"
    woken = {"a": alone["a"], "b": steps["b"], "c": steps["c"]}
    second_by_second(syncer, 5400.0, 5403.0, woken)
    for name in "bc":
        assert syncer.liveness[name].step_time_s == pytest.approx(2.0, rel=0.5)
        assert not syncer.liveness[name].live(5430.0)
    merged = second_by_second(syncer, 5403.0, 6000.0, {"a": woken["a"]})
    assert merged[0] < 5403 + 60
    assert max(b - a for a, b in itertools.pairwise(merged)) < 60


def test_a_step_time_follows_slower_steps_without_reports_in_between():
    observed = LearnerLiveness(1, 0.0, 0.0)
    for step in range(1, 40):
        observed.hear(step, False, float(step))
    for step in range(1, 40):
        observed.hear(39 + step, False, 39.0 + 100.0 * step)
    assert observed.step_time_s == pytest.approx(100.0, rel=0.1)


@pytest.mark.parametrize("pieces", [1, 5])
def test_a_merge_gives_a_learner_ten_times_the_weight_of_most_of_the_others_at_most(pieces):
    """The weight may be in one contribution or in several, and the others' work may be in earlier merges."""
    names = {"a", "b", "c"}
    rounds = RoundState(version=4, cycle=9)
    for name in sorted(names):
        rounds.pending[ContributionKey(name, 0, 0, 1)] = PendingContribution(9, 4, 10, 1)
    for piece in range(pieces):
        rounds.pending[ContributionKey("liar", 0, 0, piece)] = PendingContribution(9, 4, 1 << 40, 1)
    shares, _ = rounds.settle(names | {"liar"}, merge.weight, RunSettings())
    assert sum(share.weight for share in shares) == pytest.approx(1.0)
    assert sum(share.weight for share in shares if share.key.learner == "liar") == pytest.approx(10 / 13)
    rounds.pending[ContributionKey("liar", 0, 0, 9)] = PendingContribution(9, 4, 1 << 40, 1)
    shares, _ = rounds.settle(names | {"liar"}, merge.weight, RunSettings())
    assert [share.weight for share in shares] == pytest.approx([10 / 13])


def test_delayed_reports_do_not_make_a_learner_seem_fast():
    observed = LearnerLiveness(1, 0.0, 0.0)
    observed.hear(10, False, 5.0)
    observed.hear(14, False, 5.002)  # sent one second apart, but received together
    observed.hear(18, False, 6.0)
    assert observed.step_time_s == pytest.approx(1.0 / 4)


def test_a_learner_does_not_seem_fast_after_its_core_was_stalled():
    """Seed 3500003169: a learner seemed thirty times as fast, and a liar's reports counted ten times that."""
    observed = LearnerLiveness(1, 0.0, 0.0)
    for steps in (4, 16, 31):
        observed.hear(steps, False, 3.779)
    observed.hear(33, False, 3.871)
    assert observed.step_time_s == pytest.approx(0.092 / 2)
