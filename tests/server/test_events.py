"""Events for people: the entries that become events, and their text."""

from __future__ import annotations

from atoll_server.access.refusals import Refused, Status
from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Arrival
from atoll_server.telemetry.events import MAX_EVENTS, REFUSED_EVERY_S, EventLog

BUSY = Refused(Status.RESOURCE_EXHAUSTED, "the spool is full")


def told(*what: entries.Entry) -> list[tuple[str, str, str]]:
    log = EventLog(lambda now: now)
    for number, entry in enumerate(what):
        log.on(entry, 100.0 + number)
    return [(event.kind, event.learner, event.text) for event in log.after(0, 0)]


def joined(incarnation: int, arrival: Arrival, region: str = "eu") -> entries.Joined:
    return entries.Joined("a", region, incarnation, arrival, 7.25, "", 0)


def test_events_of_a_learner_from_its_join_to_its_eviction():
    found = told(
        joined(1, Arrival.NEW),
        entries.Silenced("a", 10.0),
        entries.Recovered("a"),
        joined(2, Arrival.RESTARTED),
        joined(2, Arrival.AGAIN),
        entries.Evicted("a", "bad"),
        entries.Readmitted("a"),
        entries.Left("a", 2),
    )
    assert found == [
        ("joined", "a", "joined from eu"),
        ("silent", "a", "has reported no step for 10 s"),
        ("back", "a", "trains again"),
        ("back", "a", "restarted as incarnation 2 after 7.2 s down"),
        ("evicted", "a", "was evicted: bad"),
        ("back", "a", "may join again"),
        ("left", "a", "left"),
    ]


def test_events_of_a_front():
    assert told(
        entries.FrontConnected("eu", "eu", 0.0),
        entries.FrontSilenced("eu", 2),
        entries.FrontConnected("eu", "eu", 44.3),
    ) == [
        ("core", "", "front eu is connected"),
        ("silent", "", "front eu is cut off; learners behind it: 2"),
        ("back", "", "front eu is connected again after 44 s"),
    ]


def test_events_of_the_run():
    found = told(
        entries.Started(3),
        entries.InitialParameters(1234, 2),
        entries.SnapshotTaken(1, 5, 100),
        entries.PauseChanged("by ann: night"),
        entries.PauseChanged(""),
        entries.Trouble("disk", "the disk is full"),
        joined(1, Arrival.NEW, region=""),
    )
    assert found == [
        ("core", "", "the core started: epoch 3"),
        ("core", "", "the run has its initial parameters (1,234)"),
        ("checkpoint", "", "checkpoint 1 is durable"),
        ("paused", "", "paused by ann: night"),
        ("resumed", "", "resumed"),
        ("trouble", "", "the disk is full"),
        ("joined", "a", "joined"),
    ]


def test_refusals_are_added_up():
    log = EventLog(lambda now: now)
    for second in range(25):
        if second:
            log.on(entries.TurnedAway("a", BUSY), float(second))
            log.on(entries.TurnedAway("b", BUSY), float(second))
        log.tell_refused(float(second))
    texts = [event.text for event in log.after(0, 0)]
    assert len(texts) == 24 // REFUSED_EVERY_S + 1
    assert texts[1].startswith("20 contributions were refused")


def test_an_event_has_the_time_of_the_run():
    log = EventLog(lambda now: 1_700_000_000.0 + now)
    log.on(entries.Left("a", 1), 5.0)
    assert [event.at for event in log.after(0, 0)] == [1_700_000_005.0]


def test_positions_belong_to_one_process_and_memory_is_limited():
    log = EventLog(lambda now: now)
    for epoch in range(MAX_EVENTS + 50):
        log.on(entries.Started(epoch), 1.0)
    everything = log.after(0, 0)
    assert len(everything) == MAX_EVENTS
    assert [event.number for event in log.after(log.log, everything[-3].number)] == [
        event.number for event in everything[-2:]
    ]
    assert len(log.after(log.log + 1, everything[-1].number)) == MAX_EVENTS
