"""Learners' reports: open rounds and versions limit the work for a report, regardless of its contents."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.goodput import TimeAccount
from atoll_server.learners.learner_counters import IncarnationCounters
from atoll_server.learners.learner_registry import LearnerRegistry
from atoll_server.links.links import LearnerTraffic, Links
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.round_state import RoundState
from atoll_server.rounds.syncer import Syncer
from atoll_server.run.reports import MAX_REPORTED, progress
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import Limits, RunSettings
from atoll_wire import outer_pb2 as pb
from atoll_wire.process.clock import SYSTEM


@pytest.fixture
def core():
    """Returns the part of a core that reports change: a real syncer in its third round, at version 2."""
    syncer, told = Syncer(RunSettings(), {0: RoundState(), 1: RoundState()}, lambda *_: 1.0), []
    syncer.on(ev.Joined("a", 1), 0.0)
    syncer.fragments[0].cycle, syncer.fragments[0].version = 3, 2
    shard = SimpleNamespace(syncer=syncer, dispatch=told.append, context=SimpleNamespace(record=lambda _: None))
    clock = RunClock(SYSTEM)
    registry = LearnerRegistry(10)
    entry = registry.join("a", "eu", 1, 0, 0.5, b"", b"t", clock.wall(), 0.0)
    return (
        SimpleNamespace(shard=shard, clock=clock, registry=registry, tell=lambda: None, links=Links()),
        entry,
        told,
    )


def answers(told):
    return [event for event in told if not isinstance(event, ev.Reported)]


def declined(cycle, fragment=0):
    return pb.Declined(fragment=fragment, cycle=cycle, reason="busy")


def test_a_repeated_decline_counts_once(core):
    core, entry, told = core
    progress(core, Limits().tokens, entry, pb.Progress(declined=[declined(3)] * MAX_REPORTED))
    progress(core, Limits().tokens, entry, pb.Progress(declined=[declined(3)] * MAX_REPORTED))
    assert answers(told) == [ev.Declined("a", 0, 3, "busy")]


def test_unknown_rounds_and_versions_are_ignored(core):
    core, entry, told = core
    strange = [declined(4), declined(1 << 63), declined(1, fragment=1), declined(1, fragment=77)]
    versions = [pb.Adopted(fragment=0, version=3), pb.Adopted(fragment=9, version=1)]
    progress(core, Limits().tokens, entry, pb.Progress(declined=strange, adopted=versions))
    assert answers(told) == []


def test_a_version_is_adopted_once(core):
    core, entry, told = core
    progress(core, Limits().tokens, entry, pb.Progress(adopted=[pb.Adopted(fragment=0, version=2)] * MAX_REPORTED))
    progress(core, Limits().tokens, entry, pb.Progress(adopted=[pb.Adopted(fragment=0, version=1)]))
    assert answers(told) == [ev.Adopted("a", 0, 2)]


def test_a_report_of_too_many_rounds_is_refused(core):
    core, entry, told = core
    with pytest.raises(Refused, match="at most 256") as refused:
        progress(core, Limits().tokens, entry, pb.Progress(declined=[declined(3)] * (MAX_REPORTED + 1)))
    assert refused.value.status is Status.INVALID_ARGUMENT
    assert told == []


def test_a_restarted_learner_is_measured_by_its_last_step_time_until_its_own_is_known(core):
    core, entry, _ = core
    entry.account.step_time_s = 0.25
    entry.account.heard(core.clock.wall(), IncarnationCounters(steps=100, tokens=100))
    progress(core, Limits().tokens, entry, pb.Progress(steps=101, tokens=101))
    assert core.shard.syncer.liveness["a"].step_time_s is None, "a new process must have no step time"
    assert entry.account.rate() is not None, "liars must be compared with restarting learners"


def test_a_learner_is_suspected_only_when_there_is_another_to_compare_it_with(core):
    core, entry, _ = core
    other = core.registry.join("b", "us", 2, 0, 0.5, b"", b"t", core.clock.wall(), 0.0)
    progress(core, Limits().tokens, entry, pb.Progress(steps=40, tokens=40_000))
    assert entry.account.current.tokens == 0, "tokens must be held back until b trains"
    assert not entry.capped
    other.account.heard(core.clock.wall(), IncarnationCounters(steps=40, tokens=400))
    other.account.step_time_s = 10.0
    progress(core, Limits().tokens, entry, pb.Progress(steps=80, tokens=80_000))
    assert entry.capped


def test_a_report_does_not_undo_a_departure(core):
    """Seed 12100000300: a report arrived while a Leave was saved, so the learner kept its data units."""
    core, entry, told = core
    entry.account.left(core.clock.wall(), itself=True)
    entry.session = 0  # as in KnownRun.left
    progress(core, Limits().tokens, entry, pb.Progress(steps=1, tokens=1))
    assert entry.account.left_at is not None
    assert not told


def test_reports_count_while_learners_have_no_session_after_a_restart_of_the_registrar(core):
    """A shard then ends all sessions, but no calls. Otherwise, all its learners would be silent until they rejoin."""
    core, entry, told = core
    core.registry.forget_sessions()
    progress(core, Limits().tokens, entry, pb.Progress(declined=[declined(3)]))
    assert answers(told) == [ev.Declined("a", 0, 3, "busy")]


def test_others_are_compared_with_a_step_time_that_was_measured_for_half_a_second(core):
    """Seed 3800023840: after delayed reports, a learner seemed three times as fast as it was."""
    core, entry, _ = core
    observed = core.shard.syncer.liveness["a"]
    for steps, at in ((40, 5.0), (43, 5.08)):
        observed.hear(steps, False, at)
        progress(core, Limits().tokens, entry, pb.Progress(steps=steps, tokens=8 * steps))
        assert entry.account.step_time_s is None
    observed.hear(52, False, 5.9)
    progress(core, Limits().tokens, entry, pb.Progress(steps=52, tokens=416))
    assert entry.account.step_time_s == pytest.approx(0.9 / 12)


def test_the_round_trip_in_a_report_is_that_of_the_learners_own_link(core):
    core, entry, _ = core
    progress(core, Limits().tokens, entry, pb.Progress(round_trip_s=0.08))
    core.links.look([LearnerTraffic("a", "eu", 1.0, 0, 0)], 0.0, 1.0)
    (link,) = core.links.all
    assert link.round_trip_s == 0.08


def test_the_last_loss_stays_until_the_process_or_its_successor_reports_another(core):
    core, entry, _ = core
    nan = float("nan")
    assert math.isnan(entry.account.latest_loss())
    progress(core, Limits().tokens, entry, pb.Progress(steps=8, tokens=8, loss=2.5))
    restored = TimeAccount.from_data(json.loads(json.dumps(entry.account.as_data(), allow_nan=False)))
    assert restored.latest_loss() == 2.5, "a restarted core must know the loss of a learner that left"
    entry.account.joined(core.clock.wall(), 1.0, returning=True)
    progress(core, Limits().tokens, entry, pb.Progress(loss=nan))
    assert entry.account.latest_loss() == 2.5, "a process without a step has no loss of its own"
    progress(core, Limits().tokens, entry, pb.Progress(steps=1, tokens=1, loss=nan))
    assert math.isnan(entry.account.latest_loss()), "a loss that is not finite must not look like the last one"
    json.dumps(entry.account.as_data(), allow_nan=False)
