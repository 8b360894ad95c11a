"""PURE: decides which learners are live, from their reports and the core's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll_wire.contract import LearnerState

MIN_SPAN_S = 0.02  # reports less than this many seconds apart are not used to measure the step time
MIN_STEP_S = 0.0005  # lower bound on a step time, so that a false report cannot make rounds open too often
SMOOTHING = 0.2  # weight of a new observation in moving averages, which have a half-life of three observations
FIRST_STEPS = 16  # number of first steps over which the step time is a plain mean, since reports arrive mid-step
LIVE_STEPS = 4.0  # a learner is live if its last inner step was at most this many of its own step times ago
LIVE_REPORTS = 5.0  # a learner is also live if its last inner step was at most this many report intervals ago
EXPECTED_S = 10.0  # a learner that takes no steps is still expected to contribute for at least this long
UNSEEN_ANSWER_S = 10.0  # a round waits at least this long for a learner that has never answered
FEW, LOOK_S = 64, 50e-6  # each learner above FEW adds LOOK_S to the minimum time between two checks after reports
NAMED = 8  # a message names at most this many learners
ANSWER_PATIENCE = 4.0  # a round waits for a learner for at most this multiple of the learner's usual answer time


def smoothed(old: float | None, seen: float) -> float:
    """Returns the updated exponential moving average. old: None before the first observation."""
    return seen if old is None else old + SMOOTHING * (seen - old)


@dataclass(slots=True)
class LearnerLiveness:
    """The core's knowledge of one learner's progress. Times are monotonic seconds on the core's clock."""

    incarnation: int
    joined_at: float
    heard_at: float
    steps: int = 0
    stepped_at: float | None = None  # time when the step counter last grew
    step_time_s: float | None = None
    remembered: bool = False  # whether step_time_s was measured before a core restart; it is kept for FIRST_STEPS steps
    first_at: float = 0.0  # start of the step time measurement, when the step counter was first_steps
    first_steps: int = 0
    report_interval_s: float | None = None
    woke_at: float | None = None  # end of the last silence, during which the process may have been frozen
    silences: int = 0  # number of consecutive reports after long gaps; only the first such gap is a silence
    answer_s: float | None = None  # smoothed time from a round's opening until this learner's contribution is durable
    paused: bool = False
    gone: bool = False
    refuse_reason: str = ""  # reason for the learner's eviction; empty if it was not evicted
    uploading: dict[int, float] = field(default_factory=dict)  # by fragment: arrival time of the newest frame

    def hear(self, steps: int, paused: bool, now: float) -> None:
        """Records a report and updates the step time, which is measured on the core's clock.

        steps: inner steps of this incarnation so far. now: monotonic seconds.
        """
        slept = self._sleeps(now - self.heard_at)
        if slept:
            self.woke_at = now
        elif now > self.heard_at:
            self.report_interval_s = smoothed(self.report_interval_s, now - self.heard_at)
        self.heard_at = now
        grown = steps - self.steps
        # Delayed reports arrive together, so the time between them does not measure the learner's pace.
        together = self.stepped_at is not None and now < self.stepped_at + MIN_SPAN_S
        if grown > 0 and together and self.stepped_at == self.first_at:
            self.first_steps = steps  # the learner took these steps before the measurement began
            self.steps = steps
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
        """Restarts the measurement after a pause of the run, so that the pause does not count as step time."""
        if self.paused and self.stepped_at is not None:
            self.stepped_at = now
            self.first_at = now
            self.first_steps = self.steps

    def _sleeps(self, gap_s: float) -> bool:
        """Returns whether the time since the previous report was a silence.

        Only the first of several consecutive long gaps is a silence. The later gaps update the report interval.
        """
        interval_s = self.report_interval_s
        silent = interval_s is not None and gap_s > max(EXPECTED_S, LIVE_REPORTS * interval_s)
        self.silences = self.silences + 1 if silent else 0
        return self._woke()

    def _woke(self) -> bool:
        """Returns whether the learner's newest report ended a silence."""
        return self.silences == 1

    def awake_since(self, at: float) -> float:
        """Returns `at`, or the end of the last silence if that is later.

        Measurements start at this time, because the learner does not work during a silence.
        """
        return at if self.woke_at is None else max(at, self.woke_at)

    def _see_steps(self, grown: int, steps: int, took_s: float, now: float) -> None:
        each_s = took_s / grown
        slower = self.step_time_s is None or each_s > self.step_time_s
        if slower and self.awake_since(now - took_s) > now - took_s:  # the process was frozen, which is not step time
            self.first_at = self.first_at + took_s
            self.first_steps = self.first_steps + grown
            return
        seen = steps - self.first_steps
        if seen > FIRST_STEPS:
            self.step_time_s = smoothed(self.step_time_s, max(MIN_STEP_S, each_s))
        elif not self.remembered:
            self.step_time_s = max(MIN_STEP_S, (now - self.first_at) / seen)

    def measured_s(self) -> float:
        """Returns how long the step time has been measured, in seconds."""
        return self.stepped_at - self.first_at if self.stepped_at is not None else 0.0

    def silent_after_s(self) -> float:
        """Returns the time without a step after which this learner is no longer live, in seconds."""
        return max(LIVE_STEPS * (self.step_time_s or 0.0), LIVE_REPORTS * (self.report_interval_s or 0.0))

    def live(self, now: float) -> bool:
        """Returns whether rounds wait for this learner.

        Rounds wait for a learner that takes steps, has just ended a silence, or reports an announced pause.
        """
        if self.gone:
            return False
        if self.step_time_s is None or self.stepped_at is None:
            return self._woke() and self.expected(now)  # the step time is unknown until the learner's next step
        return self.pausing(now) if self.paused else now - self.stepped_at <= self.silent_after_s()

    def pausing(self, now: float) -> bool:
        """Returns whether the learner announced a pause and still reports."""
        return self.paused and now - self.heard_at <= LIVE_REPORTS * (self.report_interval_s or 0.0)

    def expected(self, now: float) -> bool:
        """Returns whether the learner is expected to contribute.

        A learner is expected if it recently joined, took a step, ended a silence, or reported an announced pause. A
        pause before the first step does not count: no round can open at this learner's pace, and it may pause because
        it waits for data units whose work is pending here.
        """
        waits = self.paused and self.step_time_s is not None
        seen_at = max(self.joined_at, self.stepped_at or 0.0, self.heard_at if waits or self._woke() else 0.0)
        return not self.gone and now - seen_at <= max(EXPECTED_S, self.silent_after_s())

    def max_wait_s(self) -> float:
        """Returns the maximum time in seconds that a round waits for this learner's answer."""
        if self.answer_s is None:
            return max(UNSEEN_ANSWER_S, ANSWER_PATIENCE * (self.step_time_s or 0.0))
        return ANSWER_PATIENCE * max(self.answer_s, self.step_time_s or 0.0)


def learner_state(observed: LearnerLiveness | None, now: float, *, evicted: bool) -> LearnerState:
    """Returns a learner's state, as `atoll status` and the metrics show it.

    observed: None until the learner joins a run that has parameters. now: monotonic seconds.
    """
    if evicted:
        return LearnerState.EVICTED
    if observed is None:
        return LearnerState.JOINING
    if observed.gone:
        return LearnerState.LEFT
    if observed.pausing(now):
        return LearnerState.PAUSED
    if observed.step_time_s is None:
        return LearnerState.JOINING
    return LearnerState.LIVE if observed.live(now) else LearnerState.SILENT


def named(learners: Sequence[str]) -> str:
    """Returns text with up to NAMED names, separated by commas, and the number of the other learners."""
    more = len(learners) - NAMED
    return ", ".join(learners[:NAMED]) + (f" and {more} more" if more > 0 else "")


def look_after_s(liveness: int) -> float:
    """Returns the minimum time in seconds between two checks that reports trigger. liveness: number of learners.

    The time grows with the number of learners, because each check visits all of them.
    """
    return LOOK_S * max(0, liveness - FEW)


@dataclass(frozen=True, slots=True)
class LiveLearners:
    """The live learners at one moment. now: monotonic seconds. live: learners that rounds wait for.

    counted: learners whose work together makes up a whole outer step. These are the live learners that are not paused.
    If no learner is live, they are the learners that have neither left nor paused. fastest_step_s: the shortest step
    time of a live learner in seconds; None if no learner is live.
    """

    now: float
    live: frozenset[str]
    counted: frozenset[str]
    anybody_expected: bool
    fastest_step_s: float | None

    @classmethod
    def at(cls, liveness: Mapping[str, LearnerLiveness], now: float) -> LiveLearners:
        """Returns the live learners at `now`.

        Callers use one result for all open rounds, because this method visits every learner.
        """
        live = frozenset(name for name, observed in liveness.items() if observed.live(now))
        times = [step_s for name in live if (step_s := liveness[name].step_time_s) is not None]
        here = live or frozenset(name for name, observed in liveness.items() if not observed.gone)
        counted = frozenset(name for name in here if not liveness[name].paused)
        expected = any(observed.expected(now) for observed in liveness.values())
        return cls(now, live, counted, expected, min(times, default=None))
