"""The soak test's judge detects each kind of leak in made-up samples, and no growth in changing quantities."""

from __future__ import annotations

import pytest

from tests.soak.disturbances import CHAPTERS, Deck
from tests.soak.judge import CONNECTIONS, FILES, LAZY, MEMORY, THREADS
from tests.soak.run import Sample, series
from tests.soak.sampling import Usage, known

MIB = 2.0**20
TURNS = 12  # turns per chapter
REPORTS = "Report calls opened"
QUIET: Usage = {THREADS: 13.0, FILES: 10.0, CONNECTIONS: 5.0, MEMORY: 450 * MIB, REPORTS: 1.0}  # a learner's values


def grown(changed: dict[int, Usage], process: str = "a", minutes: float = 20.0, life: int = 1) -> list[str]:
    """Returns the judge's findings about one process. changed: turn -> differences from QUIET."""
    turns = range(TURNS * len(CHAPTERS))
    samples = [
        Sample(
            process, life, turn // TURNS, turn, 1500 / len(turns) * turn, "a cut", 1.0, QUIET | changed.get(turn, {})
        )
        for turn in turns
    ]
    return [each.sentence() for each in series(samples, minutes) if each.grew()]


def from_turn(first: int, **used: float) -> dict[int, Usage]:
    return {turn: dict(used) for turn in range(first, TURNS * len(CHAPTERS))}


def test_constant_values_have_not_grown():
    assert grown({}) == []


@pytest.mark.parametrize("quantity", [THREADS, FILES])
def test_one_leaked_thread_or_file_in_twenty_minutes_is_seen(quantity):
    value = QUIET[quantity]
    said = grown(from_turn(TURNS + 6, **{quantity: value + 1}))
    assert said == [f"learner a, start 1, chapter 2: {quantity} grew from {value:.0f} to {value + 1:.0f}"]


@pytest.mark.parametrize("quantity", [THREADS, FILES])
def test_a_leak_every_fourth_turn_is_seen_in_every_chapter(quantity):
    changed = {turn: {quantity: QUIET[quantity] + turn // 4} for turn in range(TURNS * len(CHAPTERS))}
    assert [sentence.partition(":")[0] for sentence in grown(changed)] == [
        f"learner a, start 1, chapter {chapter}" for chapter in (2, 3, 4)
    ]


def test_one_open_call_too_many_is_seen_in_whichever_sample_it_is():
    (said,) = grown({7: {REPORTS: 2.0}})
    assert said == "learner a: Report calls opened grew from 1 to 2: 1 of 48 samples are above 1"


def test_calls_that_leaked_before_the_first_sample_are_seen():
    assert len(grown(from_turn(0, **{REPORTS: 5.0}))) == 1


@pytest.mark.parametrize("quantity", [THREADS, FILES, CONNECTIONS])
def test_one_high_sample_and_a_fall_are_no_growth(quantity):
    assert grown({TURNS + 9: {quantity: QUIET[quantity] + 7}}) == []
    assert grown(from_turn(TURNS + 6, **{quantity: QUIET[quantity] - 3})) == []


def test_usage_of_an_earlier_chapter_is_no_growth_in_a_later_one():
    assert grown({5: {THREADS: 14.0}} | from_turn(2 * TURNS + 6, **{THREADS: 14.0})) == []


def test_threads_that_another_learner_had_are_no_growth_but_more_are():
    turns = range(TURNS * len(CHAPTERS))
    samples = [
        Sample(name, 1, turn // TURNS, turn, 31.0 * turn, "a cut", 1.0, QUIET | {THREADS: count})
        for turn in turns
        for name, count in (("b", 14.0), ("a", 14.0 if turn > 18 else 13.0), ("c", 15.0 if turn > 18 else 13.0))
    ]
    assert [each.sentence() for each in series(samples, 20.0) if each.grew()] == [
        "learner c, start 1, chapter 2: threads grew from 13 to 15"
    ]


def test_connections_may_be_opened_late_but_not_with_each_turn():
    assert grown(from_turn(TURNS + 6, **{CONNECTIONS: QUIET[CONNECTIONS] + LAZY})) == []
    growing = {turn: {CONNECTIONS: QUIET[CONNECTIONS] + turn} for turn in range(TURNS * len(CHAPTERS))}
    assert len(grown(growing)) == len(CHAPTERS) - 1


def test_a_front_may_have_more_late_connections_than_a_learner():
    turns = range(TURNS * len(CHAPTERS))

    def front(more: float) -> list[str]:
        samples = [
            Sample(
                "front", 1, turn // TURNS, turn, 31.0 * turn, "a cut", 1.0, QUIET | {CONNECTIONS: 30.0 + more * turn}
            )
            for turn in turns
        ]
        return [each.sentence() for each in series(samples, 20.0) if each.grew() and each.quantity == CONNECTIONS]

    assert front(0.9) == []
    assert len(front(4.0)) == len(CHAPTERS) - 1, "one per turn and learner"


def test_memory_may_grow_by_five_percent():
    turns = TURNS * len(CHAPTERS)

    def rising(percent: float) -> dict[int, Usage]:
        return {turn: {MEMORY: 450 * MIB * (1 + percent / 100 * turn / turns)} for turn in range(turns)}

    assert grown(rising(6.0)) == []
    (said,) = grown(rising(15.0))
    assert said.startswith("learner a, start 1: memory grew from ")
    assert said.endswith("; at most 5 % is allowed")


def test_growth_per_start_is_detected():
    samples = [
        Sample(
            "core",
            turn + 1,
            1,
            turn,
            10.0 * turn,
            "SIGKILL to core",
            1.0,
            QUIET | {REPORTS: 0.0, FILES: 17.0 + turn // 2},
        )
        for turn in range(12)
    ]
    assert [each.sentence() for each in series(samples, 20.0) if each.grew()] == [
        "core, after starts: other file descriptors grew from 17 to 22"
    ]


def test_threads_may_fill_their_pools_in_a_short_test_only():
    later = from_turn(TURNS + 6, **{THREADS: 15.0})
    assert grown(later, minutes=1.5) == []
    assert len(grown(later)) == 1


def test_quiet_is_one_follow_and_one_report_per_learner():
    assert known("a", "Report calls opened") == 1.0
    assert known("a", "Push calls opened") == 0.0
    assert known("front", "Follow calls opened") == known("front", "Follow calls answered") == 4.0
    assert known("core", "Report calls answered") == 4.0
    assert known("core", "Report calls opened") == 0.0
    assert known("core", THREADS) is None


def test_each_chapter_does_not_disturb_what_it_measures():
    deck = Deck(3, silences=True)
    for number, (restarted, cut) in enumerate(
        [({"core", "front"}, True), ({"core"}, True), (set(), False), ({"front"}, True)]
    ):
        drawn = [deck.draw(number) for _ in range(60)]
        assert {each.target for each in drawn if each.number is not None} == restarted | {"c", "d"}
        assert any(each.target == "the WAN" for each in drawn) is cut
        assert sum(each.silent for each in drawn) == 1
        assert not any("link of a" in str(each) for each in drawn)
