"""PURE: what the syncer knows of each learner, all of it from what the core saw on its own clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll_wire.contract import LearnerState

LEAST_SPAN_S = 0.02  # between two reports that tell how long a step takes
LEAST_STEP_S = 0.0005  # nobody trains faster, and rounds would follow whoever said so
SMOOTHING = 0.2  # of exponential averages; a half-life of three observations
FIRST_STEPS = 16  # over which a step time is a plain mean: reports come at any moment within a step
LIVE_STEPS = 4.0  # a learner is live while its last inner step is at most so many of its own steps ago
LIVE_REPORTS = 5.0  # ... or so many of its own report intervals
EXPECTED_S = 10.0  # a learner that fell silent is still expected back for so long
UNSEEN_ANSWER_S = 10.0  # patience with a learner whose first answer is still to come
FEW, LOOK_S = 64, 50e-6  # beyond so many learners, what follows from a report is looked at so much later for each
NAMED = 8  # learners in a sentence
ANSWER_PATIENCE = 4.0  # a round waits for so many times a learner's usual time to answer


def smoothed(old: float | None, seen: float) -> float:
    """Exponential moving average; the first observation stands for itself."""
    return seen if old is None else old + SMOOTHING * (seen - old)


@dataclass(slots=True)
class Member:
    """One learner as the core sees it. Times are monotonic seconds of the core."""

    incarnation: int
    joined_at: float
    heard_at: float
    steps: int = 0
    stepped_at: float | None = None  # when the step counter was last seen to grow
    step_time_s: float | None = None
    remembered: bool = False  # the step time is of before a restart of the core: it counts until enough is seen
    first_at: float = 0.0  # when the step counter was first seen, at first_steps
    first_steps: int = 0
    report_interval_s: float | None = None
    woke_at: float | None = None  # when it was heard of again after a silence; its process may have been frozen
    silences: int = 0  # in a row: reports each of which came after a silence
    answer_s: float | None = None  # round opened -> its contribution durable
    paused: bool = False
    gone: bool = False
    unwanted: str = ""  # why it was sent away
    uploading: dict[int, float] = field(default_factory=dict)  # fragment -> when its last frame came

    def hear(self, steps: int, paused: bool, now: float) -> None:
        """Takes in a report. Cadence comes from the core's clock, not from the learner's word."""
        slept = self._sleeps(now - self.heard_at)
        if slept:
            self.woke_at = now
        elif now > self.heard_at:
            self.report_interval_s = smoothed(self.report_interval_s, now - self.heard_at)
        self.heard_at = now
        grown = steps - self.steps
        # Reports that a link held up come together, and say nothing of the pace: the next one tells.
        together = self.stepped_at is not None and now < self.stepped_at + LEAST_SPAN_S
        if grown > 0 and not together:
            if self.stepped_at is None:
                self.first_at = now
                self.first_steps = steps
            elif not self.paused:
                self._see_steps(grown, steps, now - self.stepped_at, now)
            self.stepped_at = now
            self.steps = steps
        self.paused = paused

    def resume(self, now: float) -> None:
        """The run goes on after a pause of all: that was no step's time. Who died in it is paused still, and silent."""
        if self.paused and self.stepped_at is not None:
            self.stepped_at = now
            self.first_at = now
            self.first_steps = self.steps

    def _sleeps(self, gap_s: float) -> bool:
        """Whether nothing was heard for much longer than usual. Twice in a row: that is what is usual now."""
        interval_s = self.report_interval_s
        silent = interval_s is not None and gap_s > max(EXPECTED_S, LIVE_REPORTS * interval_s)
        self.silences = self.silences + 1 if silent else 0
        return self._woke()

    def _woke(self) -> bool:
        """Whether its newest report ended a silence."""
        return self.silences == 1

    def awake_since(self, at: float) -> float:
        """That moment, or a later one at which it was heard of again: what came between was no work of its."""
        return at if self.woke_at is None else max(at, self.woke_at)

    def _see_steps(self, grown: int, steps: int, took_s: float, now: float) -> None:
        each_s = took_s / grown
        slower = self.step_time_s is None or each_s > self.step_time_s
        if slower and self.awake_since(now - took_s) > now - took_s:  # frozen meanwhile: that was no step's time
            self.first_at = self.first_at + took_s
            self.first_steps = self.first_steps + grown
            return
        seen = steps - self.first_steps
        if seen > FIRST_STEPS:
            self.step_time_s = smoothed(self.step_time_s, max(LEAST_STEP_S, each_s))
        elif not self.remembered:
            self.step_time_s = max(LEAST_STEP_S, (now - self.first_at) / seen)

    def silent_after_s(self) -> float:
        """How long without a step makes this learner no longer live."""
        return max(LIVE_STEPS * (self.step_time_s or 0.0), LIVE_REPORTS * (self.report_interval_s or 0.0))

    def live(self, now: float) -> bool:
        """Whether rounds count on this learner: it steps, woke, or announced a pause and still reports."""
        if self.gone:
            return False
        if self.step_time_s is None or self.stepped_at is None:
            return self._woke() and self.expected(now)  # it has more to do than the step that tells
        return self.pausing(now) if self.paused else now - self.stepped_at <= self.silent_after_s()

    def pausing(self, now: float) -> bool:
        """Whether it announced a pause, and still reports."""
        return self.paused and now - self.heard_at <= LIVE_REPORTS * (self.report_interval_s or 0.0)

    def expected(self, now: float) -> bool:
        """Whether it may yet contribute: it is live, or joined, woke or stopped a short time ago only."""
        seen_at = max(self.joined_at, self.stepped_at or 0.0, self.heard_at if self.paused or self._woke() else 0.0)
        return not self.gone and now - seen_at <= max(EXPECTED_S, self.silent_after_s())

    def patience_s(self) -> float:
        """How long a round waits for this learner's answer."""
        if self.answer_s is None:
            return max(UNSEEN_ANSWER_S, ANSWER_PATIENCE * (self.step_time_s or 0.0))
        return ANSWER_PATIENCE * max(self.answer_s, self.step_time_s or 0.0)


def learner_state(member: Member | None, now: float, *, evicted: bool) -> LearnerState:
    """How a learner is doing: the one place that decides it. member: None before it joined a run with parameters."""
    if evicted:
        return LearnerState.EVICTED
    if member is None:
        return LearnerState.JOINING
    if member.gone:
        return LearnerState.LEFT
    if member.pausing(now):
        return LearnerState.PAUSED
    if member.step_time_s is None:
        return LearnerState.JOINING
    return LearnerState.LIVE if member.live(now) else LearnerState.SILENT


def named(learners: Sequence[str]) -> str:
    """In words, the first few of them."""
    more = len(learners) - NAMED
    return ", ".join(learners[:NAMED]) + (f" and {more} more" if more > 0 else "")


def look_after_s(members: int) -> float:
    """How soon a report needs to be looked at: one of many changes little, and each look goes over all of them."""
    return LOOK_S * max(0, members - FEW)


@dataclass(frozen=True, slots=True)
class Present:
    """Who is there at one moment. live: learners that rounds count on; fastest_step_s: None when nobody is live.

    counted: learners whose work a merge is a part of: who is live and not paused; if nobody is, who has not left.
    """

    now: float
    live: frozenset[str]
    counted: frozenset[str]
    anybody_expected: bool
    fastest_step_s: float | None

    @classmethod
    def at(cls, members: Mapping[str, Member], now: float) -> Present:
        """Looks at each once, so that an event costs the same however many rounds are open."""
        live = frozenset(name for name, member in members.items() if member.live(now))
        times = [step_s for name in live if (step_s := members[name].step_time_s) is not None]
        here = live or frozenset(name for name, member in members.items() if not member.gone)
        counted = frozenset(name for name in here if not members[name].paused)
        expected = any(member.expected(now) for member in members.values())
        return cls(now, live, counted, expected, min(times, default=None))
