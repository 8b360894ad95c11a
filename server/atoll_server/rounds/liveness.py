"""PURE: each learner's state for the syncer, measured on the core's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll_wire.contract import LearnerState

MIN_SPAN_S = 0.02  # shortest time between two reports that measure a step time
MIN_STEP_S = 0.0005  # lower bound of a step time, since rounds follow the fastest learner and reports may be false
SMOOTHING = 0.2  # weight of a new value in exponential averages, for a half-life of three observations
FIRST_STEPS = 16  # over these steps, the step time is a plain mean, since reports arrive at any moment within a step
LIVE_STEPS = 4.0  # a learner is live if its last inner step was at most this many of its own step times ago
LIVE_REPORTS = 5.0  # or at most this many of its own report intervals ago
EXPECTED_S = 10.0  # time within which a silent learner is expected back
UNSEEN_ANSWER_S = 10.0  # shortest wait of a round for a learner that has never answered
FEW, LOOK_S = 64, 50e-6  # above FEW learners, each further one delays the check after a report by LOOK_S
NAMED = 8  # limit on the learners named in a sentence
ANSWER_PATIENCE = 4.0  # longest wait of a round for a learner, as a multiple of its usual time to answer


def smoothed(old: float | None, seen: float) -> float:
    """Returns the exponential moving average. old: None before the first observation."""
    return seen if old is None else old + SMOOTHING * (seen - old)


@dataclass(slots=True)
class LearnerLiveness:
    """One learner as observed by the core. Times are monotonic seconds on the core's clock."""

    incarnation: int
    joined_at: float
    heard_at: float
    steps: int = 0
    stepped_at: float | None = None  # time when the step counter last grew
    step_time_s: float | None = None
    remembered: bool = (
        False  # whether the step time is from before a core restart; it is used until enough steps are seen
    )
    first_at: float = 0.0  # time of the first report of the step counter, whose value was first_steps
    first_steps: int = 0
    report_interval_s: float | None = None
    woke_at: float | None = None  # time of a report that ended a silence, in which the process may have been frozen
    silences: int = 0  # number of consecutive reports that each ended a silence
    answer_s: float | None = None  # smoothed time from a round's opening until its contribution is durable
    paused: bool = False
    gone: bool = False
    refuse_reason: str = ""  # the reason for its eviction; empty if not evicted
    uploading: dict[int, float] = field(default_factory=dict)  # fragment -> arrival time of its last frame

    def hear(self, steps: int, paused: bool, now: float) -> None:
        """Records a report. The core's clock measures the step time; the learner does not report it."""
        slept = self._sleeps(now - self.heard_at)
        if slept:
            self.woke_at = now
        elif now > self.heard_at:
            self.report_interval_s = smoothed(self.report_interval_s, now - self.heard_at)
        self.heard_at = now
        grown = steps - self.steps
        # Delayed reports arrive together and do not show the pace. The next report does.
        together = self.stepped_at is not None and now < self.stepped_at + MIN_SPAN_S
        if grown > 0 and together and self.stepped_at == self.first_at:
            self.first_steps = steps  # steps before the first report arrived
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
        """Excludes a pause of the run from step time. A learner that died during the pause stays paused and silent."""
        if self.paused and self.stepped_at is not None:
            self.stepped_at = now
            self.first_at = now
            self.first_steps = self.steps

    def _sleeps(self, gap_s: float) -> bool:
        """Returns whether this gap was a silence.

        After two long gaps in a row, long gaps count as the report interval.
        """
        interval_s = self.report_interval_s
        silent = interval_s is not None and gap_s > max(EXPECTED_S, LIVE_REPORTS * interval_s)
        self.silences = self.silences + 1 if silent else 0
        return self._woke()

    def _woke(self) -> bool:
        """Returns whether the learner's newest report ended a silence."""
        return self.silences == 1

    def awake_since(self, at: float) -> float:
        """Returns the later of `at` and the end of the last silence, during which the learner did not work."""
        return at if self.woke_at is None else max(at, self.woke_at)

    def _see_steps(self, grown: int, steps: int, took_s: float, now: float) -> None:
        each_s = took_s / grown
        slower = self.step_time_s is None or each_s > self.step_time_s
        if slower and self.awake_since(now - took_s) > now - took_s:  # the process was frozen: not step time
            self.first_at = self.first_at + took_s
            self.first_steps = self.first_steps + grown
            return
        seen = steps - self.first_steps
        if seen > FIRST_STEPS:
            self.step_time_s = smoothed(self.step_time_s, max(MIN_STEP_S, each_s))
        elif not self.remembered:
            self.step_time_s = max(MIN_STEP_S, (now - self.first_at) / seen)

    def measured_s(self) -> float:
        """Returns the duration of this process's step time measurement in seconds, exact to one report interval."""
        return self.stepped_at - self.first_at if self.stepped_at is not None else 0.0

    def silent_after_s(self) -> float:
        """Returns the time without a step after which this learner is no longer live, in seconds."""
        return max(LIVE_STEPS * (self.step_time_s or 0.0), LIVE_REPORTS * (self.report_interval_s or 0.0))

    def live(self, now: float) -> bool:
        """Returns whether rounds wait for this learner.

        They wait if it makes steps, has just woken, or announced a pause and still reports.
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
        """Returns whether the learner may still contribute.

        It may if it is live, or if it joined, woke or stopped recently.
        """
        seen_at = max(self.joined_at, self.stepped_at or 0.0, self.heard_at if self.paused or self._woke() else 0.0)
        return not self.gone and now - seen_at <= max(EXPECTED_S, self.silent_after_s())

    def max_wait_s(self) -> float:
        """Returns the longest wait of a round for this learner's answer, in seconds."""
        if self.answer_s is None:
            return max(UNSEEN_ANSWER_S, ANSWER_PATIENCE * (self.step_time_s or 0.0))
        return ANSWER_PATIENCE * max(self.answer_s, self.step_time_s or 0.0)


def learner_state(observed: LearnerLiveness | None, now: float, *, evicted: bool) -> LearnerState:
    """Returns a learner's state, which only this function decides.

    observed: None before it joined a run with parameters.
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
    """Returns the first NAMED names, and the number of further names."""
    more = len(learners) - NAMED
    return ", ".join(learners[:NAMED]) + (f" and {more} more" if more > 0 else "")


def look_after_s(liveness: int) -> float:
    """Returns the seconds between two checks after reports.

    Each check visits all learners, and a report changes little.
    """
    return LOOK_S * max(0, liveness - FEW)


@dataclass(frozen=True, slots=True)
class LiveLearners:
    """The learners at one moment. live: learners for which rounds wait. fastest_step_s: None if no learner is live.

    counted: learners whose work together makes a whole outer step. They are live and not paused. If no learner is live,
    they are all learners that have not left.
    """

    now: float
    live: frozenset[str]
    counted: frozenset[str]
    anybody_expected: bool
    fastest_step_s: float | None

    @classmethod
    def at(cls, liveness: Mapping[str, LearnerLiveness], now: float) -> LiveLearners:
        """Returns the learners at `now`.

        Visits each learner once, so that an event's cost does not grow with the number of open rounds.
        """
        live = frozenset(name for name, observed in liveness.items() if observed.live(now))
        times = [step_s for name in live if (step_s := liveness[name].step_time_s) is not None]
        here = live or frozenset(name for name, observed in liveness.items() if not observed.gone)
        counted = frozenset(name for name in here if not liveness[name].paused)
        expected = any(observed.expected(now) for observed in liveness.values())
        return cls(now, live, counted, expected, min(times, default=None))
