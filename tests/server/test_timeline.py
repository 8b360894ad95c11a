"""The history of rounds, from the journal's entries."""

from __future__ import annotations

import pytest
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.round_state import RoundState
from atoll_server.rounds.syncer import Syncer
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.settings import RunSettings
from atoll_server.telemetry import entries
from atoll_server.telemetry.metrics import Metrics
from atoll_server.telemetry.timeline import MAX_ANSWERS, MAX_ROUNDS, Timeline, slowest
from prometheus_client import CollectorRegistry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def published(merge: ev.Merge) -> entries.Published:
    return entries.Published(merge, 1, 0, 0)


class Told:
    """A syncer of one fragment, two learners that step once per second, and a timeline with all entries."""

    def __init__(self, **settings) -> None:
        self.metrics = Metrics()
        self.timeline = Timeline(self.metrics)
        self.merging: list[ev.Merge] = []
        self.syncer = Syncer(
            RunSettings(inner_steps=8, overlap_steps=4, **settings),
            {0: RoundState()},
            lambda *_: 1.0,
        )
        for step in range(8):
            for name in ("a", "b"):
                if not step:
                    self.on(ev.Joined(name, 1), 0.0)
                self.on(ev.Reported(name, step + 1, False), float(step))

    def on(self, event: ev.SyncerEvent, now: float) -> list[ev.Effect]:
        """Records an entry for the event, then one for each effect, as the shard does."""
        match event:
            case ev.Contributed():
                self.timeline.on(entries.Acknowledged(event.key, event.cycle), now)
            case ev.Declined():
                self.timeline.on(entries.Declined(event.learner, event.fragment, event.cycle, event.reason), now)
            case ev.Adopted():
                self.timeline.on(entries.Adopted(event.learner, event.fragment, event.version), now)
            case ev.Merged():
                self.timeline.on(published(self.merging.pop()), now)
        effects = self.syncer.on(event, now)
        for effect in effects:
            match effect:
                case ev.OpenRound():
                    self.timeline.on(entries.RoundOpened(effect.fragment, effect.cycle), now)
                case ev.Merge():
                    self.merging.append(effect)
                    self.timeline.on(entries.RoundClosed(effect), now)
                case ev.Lapse():
                    self.timeline.on(entries.RoundLapsed(effect), now)
        return effects

    def contributed(self, name: str, now: float, cycle: int = 1) -> list[ev.Effect]:
        return self.on(ev.Contributed(ContributionKey(name, 1, 0, cycle), cycle, 0, 10, 8), now)


def test_a_round_is_recorded_from_its_opening_to_each_adoption():
    told = Told()
    newest = next(told.timeline.newest())
    opened_at = newest.opened_at
    for later in (0.5, 0.7):  # another stream of the same upload
        told.timeline.on(entries.UploadBegan(ContributionKey("a", 1, 0, 1), newest.cycle, 0), opened_at + later)
    told.contributed("a", opened_at + 1.0)
    (merge,) = (each for each in told.contributed("b", opened_at + 1.5) if isinstance(each, ev.Merge))
    assert merge.cause is ev.Cause.ALL_ANSWERED
    told.timeline.on(entries.MergeComputed(0, 1), opened_at + 1.7)
    told.on(ev.Merged(0, 1), opened_at + 1.8)
    told.on(ev.Adopted("b", 0, 1), opened_at + 2.8)
    assert newest.quorum_at == opened_at + 1.0
    assert (newest.closed_at, newest.merged_at, newest.published_at) == (
        opened_at + 1.5, opened_at + 1.7, opened_at + 1.8,
    )  # fmt: skip
    assert newest.reason == "every live learner has answered"
    a, b = newest.answers["a"], newest.answers["b"]
    assert (a.began_at, a.durable_at, a.adopted_at, a.late) == (opened_at + 0.5, opened_at + 1.0, None, False)
    assert (b.durable_at, b.adopted_at, b.weight) == (opened_at + 1.5, opened_at + 2.8, 0.5)
    read = told.metrics.registry
    assert value(read, "atoll_rounds_closed_total", cause="all_answered") == 1
    assert value(read, "atoll_rounds_total", outcome="merged") == 1
    for name, seconds in (("quorum_wait", 1.0), ("grace_wait", 0.5), ("merge", 0.2), ("publish", 0.1), ("adopt", 1.0)):
        assert abs(value(read, f"atoll_{name}_seconds_sum") - seconds) < 1e-9, name
    assert value(read, "atoll_contribution_weight_count") == 2


def test_late_work_is_late_in_the_round_that_merges_it():
    told = Told()
    first = next(told.timeline.newest())
    told.on(ev.Declined("b", 0, first.cycle, "no outstanding work for this fragment"), first.opened_at + 0.1)
    told.contributed("a", first.opened_at + 0.2)
    told.contributed("b", first.opened_at + 0.3)  # during its merge
    assert first.answers["b"].declined == "no outstanding work for this fragment"
    told.on(ev.Merged(0, 1), first.opened_at + 0.4)
    now = first.opened_at + 8.0
    told.on(ev.Reported("a", 20, False), now)
    told.on(ev.Reported("b", 20, False), now)
    second = next(told.timeline.newest())
    assert second is not first
    told.contributed("a", now + 0.5, second.cycle)
    assert second.closed_at == now + 0.5, "b's late work must be its answer"
    assert (second.answers["b"].late, second.answers["a"].late) == (True, False)


def test_a_round_without_work_lapses():
    told = Told()
    first = next(told.timeline.newest())
    for name in ("a", "b"):
        told.on(ev.Declined(name, 0, first.cycle, "it was just started"), first.opened_at + 0.1)
    assert (first.lapsed, first.closed_at) == (True, first.opened_at + 0.1)
    assert value(told.metrics.registry, "atoll_rounds_total", outcome="lapsed") == 1


def test_a_paused_run_opens_no_round_and_then_continues_at_its_pace():
    told = Told()
    first = next(told.timeline.newest())
    told.on(ev.Paused(True), first.opened_at + 0.1)
    told.contributed("a", first.opened_at + 0.2)
    assert first.closed_at is None
    told.contributed("b", first.opened_at + 0.3)
    told.on(ev.Merged(0, 1), first.opened_at + 0.4)
    at = first.opened_at
    for _ in range(60):
        at += 1.0
        for name in ("a", "b"):
            told.on(ev.Reported(name, 8, True), at)
    assert next(told.timeline.newest()) is first
    assert told.syncer.next_wake(at) is None
    (opened,) = told.on(ev.Paused(False), at)
    assert isinstance(opened, ev.OpenRound)


def test_a_limited_number_of_rounds_is_kept_with_the_slowest_answers():
    timeline, metrics = Timeline(Metrics()), Metrics()
    assert metrics.registry is not None
    for cycle in range(1, MAX_ROUNDS + 10):
        timeline.on(entries.RoundOpened(0, cycle), float(cycle))
        timeline.on(
            entries.RoundLapsed(ev.Lapse(0, cycle, ev.Cause.ALL_SILENT, "no learner is expected")),
            float(cycle),
        )
    kept = list(timeline.newest())
    assert len(kept) == MAX_ROUNDS
    assert kept[0].cycle == MAX_ROUNDS + 9
    for number in range(10):
        kept[0].answer(f"n{number}").durable_at = float(number)
    kept[0].answer("missing").began_at = 1.0
    kept[0].answer("idle").declined = "no outstanding work for this fragment"
    assert [name for name, _ in slowest(kept[0], 3)] == ["missing", "n9", "n8"]
    assert [name for name, _ in slowest(kept[0], 99)][-1] == "idle"


def test_an_open_round_is_kept_whatever_the_number_of_others():
    timeline = Timeline(Metrics())
    timeline.on(entries.RoundOpened(7, 1), 0.0)
    for cycle in range(1, MAX_ROUNDS + 10):
        timeline.on(entries.RoundOpened(0, cycle), float(cycle))
        timeline.on(
            entries.RoundLapsed(ev.Lapse(0, cycle, ev.Cause.ALL_SILENT, "no learner is expected")),
            float(cycle),
        )
    assert len(list(timeline.newest())) == MAX_ROUNDS
    assert any((seen.fragment, seen.cycle) == (7, 1) for seen in timeline.newest())


def merging(fragment: int, learners: int) -> ev.Merge:
    shares = tuple(
        ev.Share(ContributionKey(f"n{number}", 1, fragment, 1), 1 / learners, 0.0) for number in range(learners)
    )
    return ev.Merge(fragment, 1, 1, shares, (), 1.0, None, ev.Cause.ALL_ANSWERED, "every live learner has answered")


@pytest.mark.parametrize(("rounds", "learners"), [(MAX_ROUNDS + 150, 1), (5, MAX_ANSWERS // 5 + 1)])
def test_rounds_are_kept_until_they_are_published_however_many_are_in_flight(rounds: int, learners: int):
    told = Timeline(Metrics())
    for fragment in range(rounds):
        told.on(entries.RoundOpened(fragment, 1), float(fragment))
        told.on(entries.RoundClosed(merging(fragment, learners)), fragment + 0.5)
    for fragment in range(rounds):
        told.on(entries.MergeComputed(fragment, 1), 1000.0)
        told.on(published(merging(fragment, learners)), 1001.0)
    assert [seen.merged_at for seen in told.newest()] == [1000.0] * rounds
    told.on(entries.RoundOpened(0, 2), 1002.0)  # these may be removed now
    kept = list(told.newest())
    assert len(kept) <= MAX_ROUNDS
    assert sum(len(seen.answers) for seen in kept) <= MAX_ANSWERS


def test_a_merge_of_an_unknown_round_is_left_out():
    told = Timeline(Metrics())
    told.on(entries.MergeComputed(3, 9), 1.0)
    told.on(published(merging(3, 1)), 1.0)
    told.on(entries.Adopted("a", 3, 9), 1.0)
    assert not list(told.newest())
