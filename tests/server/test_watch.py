"""Polled states and problems: each change is recorded once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from atoll_server.learners.goodput import TimeAccount
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.links.link import MergePace
from atoll_server.links.links import Links
from atoll_server.rounds.liveness import LearnerLiveness
from atoll_server.run.watch import Watch
from atoll_server.telemetry import entries
from atoll_server.telemetry.journal import Journal
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import LearnerState

DISK = entries.Trouble("disk", "the disk is full")


class Run:
    """A run with learner a, whose liveness the test changes. The run's clock is 1000 s ahead of the monotonic clock."""

    def __init__(self) -> None:
        self.entry = RegistryEntry("a", "eu", 1, [1], TimeAccount(1000.0, 1000.0))
        self.observed = LearnerLiveness(1, 0.0, 0.0, steps=9, stepped_at=0.0, step_time_s=1.0, report_interval_s=1.0)
        self.recorded: list[entries.Entry] = []
        journal = Journal()
        journal.subscribe(lambda entry, _: self.recorded.append(entry), only_shows=False)
        shard = SimpleNamespace(syncer=SimpleNamespace(liveness={"a": self.observed}))
        run: Any = SimpleNamespace(
            registry=SimpleNamespace(entries={"a": self.entry}, since=0.0),
            shard=shard,
            links=Links(),
            pace=lambda _: MergePace(0.0, None, 4),
            journal=journal,
            clock=SimpleNamespace(at=lambda now: 1000.0 + now),
        )
        self.links = run.links
        self.watch = Watch(run)

    def look(self, now: float, *troubles: entries.Trouble) -> LearnerState:
        return self.watch.look(troubles, now)["a"]

    def step(self, now: float) -> None:
        self.observed.stepped_at = self.observed.heard_at = now


def test_a_silence_and_its_end_are_recorded_once():
    run = Run()
    assert run.look(1.0) is LearnerState.LIVE
    for now in (8.0, 9.0, 10.0):
        assert run.look(now) is LearnerState.SILENT
    assert run.watch.since["a"] == 1000.0, "a silence must begin at the last step"
    run.step(11.0)
    for now in (11.0, 12.0):
        assert run.look(now) is LearnerState.LIVE
    assert run.watch.since["a"] == 1011.0
    assert run.recorded == [entries.Silenced("a", 8.0), entries.Recovered("a")]


def test_the_first_state_is_not_a_change():
    run = Run()
    assert run.look(60.0) is LearnerState.SILENT
    assert run.watch.since["a"] == 1000.0
    run.step(61.0)
    assert run.look(61.0) is LearnerState.LIVE
    assert run.recorded == [], "a core that has just started has not heard the learner yet"


def test_a_restart_is_not_recorded_as_a_recovery():
    run = Run()
    run.look(1.0)
    run.look(9.0)
    run.entry.incarnation = 2
    run.step(10.0)
    assert run.look(10.0) is LearnerState.LIVE
    assert run.recorded == [entries.Silenced("a", 9.0)], "the restart is already recorded"


def test_an_evicted_learner_that_left_is_evicted_until_it_may_join():
    run = Run()
    run.observed.gone = True
    run.entry.evicted = "bad"
    assert run.look(1.0) is LearnerState.EVICTED
    run.entry.evicted = ""
    assert run.look(2.0) is LearnerState.LEFT


def test_a_trouble_is_recorded_once_even_if_its_figures_change():
    run = Run()
    run.observed.gone = True
    for now in (1.0, 2.0, 3.0):
        run.look(now, entries.Trouble("total tokens", f"{now} tokens too many"))
    run.look(4.0)
    run.look(5.0, DISK)
    run.look(6.0, DISK)
    run.look(7.0)
    run.look(8.0, DISK)
    assert run.recorded == [entries.Trouble("total tokens", "1.0 tokens too many"), DISK, DISK]


def test_a_learner_behind_a_silent_front_is_cut_off_and_not_recorded_as_silent():
    run = Run()
    announced = pb.FrontReport(nonce=7, region="eu")
    front = run.links.announced(announced, "", "", 0.0)
    run.links.heard(front, announced, 0.0)
    run.links.follows("a", 7)
    assert run.look(1.0) is LearnerState.LIVE
    for now in (8.0, 9.0, 10.0):
        assert run.look(now) is LearnerState.CUT_OFF
    assert run.watch.since["a"] == 1000.0, "it may have trained since, but no report says so"
    run.links.heard(front, announced, 11.0)
    assert run.look(11.0) is LearnerState.CUT_OFF, "it needs some seconds to reconnect"
    run.step(12.0)
    assert run.look(12.0) is LearnerState.LIVE
    assert run.recorded == [
        entries.FrontConnected("eu", "eu", 0.0),
        entries.FrontSilenced("eu", 1),
        entries.FrontConnected("eu", "eu", 11.0),
    ]


def test_a_silence_behind_a_front_is_recorded_when_it_is_sure_that_the_front_is_not_silent():
    run = Run()
    run.observed.step_time_s = run.observed.report_interval_s = 0.02
    announced = pb.FrontReport(nonce=7, region="eu")
    front = run.links.announced(announced, "", "", 0.0)
    run.links.heard(front, announced, 0.0)
    run.links.follows("a", 7)
    assert run.look(0.0) is LearnerState.LIVE
    run.links.heard(front, announced, 0.5)
    assert run.look(1.0) is LearnerState.SILENT, "whether its front is silent is not known yet"
    assert run.look(2.0) is LearnerState.CUT_OFF
    for now in (7.0, 8.0):
        assert run.look(now) is LearnerState.CUT_OFF
    run.links.heard(front, announced, 9.0)
    run.step(10.0)
    assert run.look(10.0) is LearnerState.LIVE
    assert not [each for each in run.recorded if isinstance(each, entries.Silenced | entries.Recovered)]
    for second in range(11, 60):
        run.links.heard(front, announced, float(second))
        run.look(float(second))
    silences = [each for each in run.recorded if isinstance(each, entries.Silenced)]
    assert silences == [entries.Silenced("a", silences[0].silent_s)], "its front is connected, so it is recorded once"
