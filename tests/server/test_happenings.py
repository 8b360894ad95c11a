"""What happened, found by comparing one look at a run with the next."""

from __future__ import annotations

from dataclasses import replace

from atoll_server.telemetry.happenings import MOST_EVENTS, REFUSED_EVERY_S, Diary, Look, Sight

LIVE = Sight("live", "eu", 1, 100.0, 0.0)
NOTHING = Look(100.0, {}, 0, 0, "", 0, ())


def told(diary: Diary) -> list[tuple[str, str, str]]:
    return [(event.kind, event.learner, event.text) for event in diary.after(0, 0)]


def test_a_learner_from_its_joining_to_its_eviction():
    diary = Diary()
    diary.look(NOTHING)
    diary.look(replace(NOTHING, at=101.0, learners={"a": replace(LIVE, state="joining")}))
    diary.look(replace(NOTHING, at=102.0, learners={"a": LIVE}))
    assert diary.since["a"] == 102.0
    diary.look(replace(NOTHING, at=120.0, learners={"a": replace(LIVE, state="silent", stepped_at=110.0)}))
    assert diary.since["a"] == 110.0, "since it was last heard of, not since that was noticed"
    diary.look(replace(NOTHING, at=130.0, learners={"a": LIVE}))
    diary.look(replace(NOTHING, at=140.0, learners={"a": replace(LIVE, incarnation=2, down_s=7.25)}))
    diary.look(replace(NOTHING, at=150.0, learners={"a": replace(LIVE, state="evicted", incarnation=2, evicted="bad")}))
    diary.look(replace(NOTHING, at=160.0, learners={"a": replace(LIVE, state="left", incarnation=2)}))
    assert told(diary) == [
        ("joined", "a", "joined from eu"),
        ("silent", "a", "makes no steps since 10 s"),
        ("back", "a", "trains again"),
        ("back", "a", "was started again, as incarnation 2: 7.2 s down"),
        ("evicted", "a", "was evicted: bad"),
        ("back", "a", "may join again"),
    ]


def test_a_core_that_starts_tells_nothing_of_what_it_found():
    diary = Diary()
    silent = replace(LIVE, state="silent", stepped_at=60.0)
    diary.look(replace(NOTHING, learners={"a": LIVE, "b": silent}, checkpoint=7, refused=3, parameters=10))
    assert told(diary) == []
    assert diary.since == {"a": 100.0, "b": 60.0}
    diary.look(replace(NOTHING, at=101.0, learners={"a": LIVE, "b": LIVE}, checkpoint=7, refused=3, parameters=10))
    assert told(diary) == [], "until its first step whoever trains on is silent for a core that has just started"


def test_the_run_itself():
    diary = Diary()
    diary.look(NOTHING)
    diary.look(replace(NOTHING, at=101.0, parameters=1234))
    diary.look(replace(NOTHING, at=102.0, parameters=1234, checkpoint=1, paused="by ann: night"))
    diary.look(replace(NOTHING, at=103.0, parameters=1234, checkpoint=1, troubles=("the disk is full",)))
    diary.look(replace(NOTHING, at=104.0, parameters=1234, checkpoint=1, troubles=("the disk is full",)))
    assert [(kind, text) for kind, _, text in told(diary)] == [
        ("core", "the run has its first parameters: 1,234"),
        ("checkpoint", "checkpoint 1 is durable"),
        ("paused", "paused by ann: night"),
        ("paused", "the run goes on"),
        ("trouble", "the disk is full"),
    ]


def test_refusals_are_added_up():
    diary = Diary()
    for second in range(25):
        diary.look(replace(NOTHING, at=100.0 + second, refused=2 * second))
    texts = [text for _, _, text in told(diary)]
    assert len(texts) == 25 // REFUSED_EVERY_S + 1
    assert texts[1].startswith("20 contributions were refused")


def test_positions_are_of_one_process_and_memory_is_bounded():
    diary = Diary()
    for number in range(MOST_EVENTS + 50):
        diary.note(1.0, "core", str(number))
    everything = diary.after(0, 0)
    assert len(everything) == MOST_EVENTS
    assert [event.number for event in diary.after(diary.log, everything[-3].number)] == [
        event.number for event in everything[-2:]
    ]
    assert len(diary.after(diary.log + 1, everything[-1].number)) == MOST_EVENTS
