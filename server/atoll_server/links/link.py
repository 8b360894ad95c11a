"""PURE: one link to the core, with its state, its rates and the time that it may be silent before work is discarded.

Times are monotonic seconds on the core's clock.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from atoll_wire.contract import LinkState

SILENT_S = 5.0  # seconds without a message after which a link is silent; a front sends one per second
RATE_S = 10.0  # a rate covers at least half of this time, and at most a second more
ARRIVAL_STEPS = 1.0  # outer steps within which work arrives after an outage, since each fragment syncs once per step


@dataclass(frozen=True, slots=True)
class MergePace:
    """How fast merges make older work stale. outer_steps: number of outer steps so far, as a mean over fragments.

    outer_step_s: shortest duration of an outer step in seconds; None while nothing is merged. live: the live learners.
    """

    outer_steps: float
    outer_step_s: float | None
    max_staleness: int
    live: Set[str] = frozenset()


@dataclass(slots=True)
class Traffic:
    """The payload bytes over a link in each direction. moved_at: time when a total last grew; None if it never grew."""

    up: int = 0
    down: int = 0
    moved_at: float | None = None
    _marks: list[tuple[float, int, int]] = field(default_factory=list)  # times and totals; rates begin at the oldest

    def saw(self, up: int, down: int, now: float) -> None:
        """Records the totals. Totals that are lower than before come from a new process."""
        if up < self.up or down < self.down or not self._marks:
            self._marks = [(now, up, down)]
        elif (up, down) != (self.up, self.down):
            self.moved_at = now
        self.up, self.down = up, down
        if now - self._marks[-1][0] >= RATE_S / 2:
            self._marks = [self._marks[-1], (now, up, down)]

    def rates(self, now: float) -> tuple[float, float]:
        """Returns the rates up and down in bytes per second."""
        if not self._marks:
            return 0.0, 0.0
        since, up, down = self._marks[0]
        span_s = max(now - since, 1.0)
        return (self.up - up) / span_s, (self.down - down) / span_s


@dataclass(slots=True, eq=False)
class Link:
    """The link of a front, or of a learner that calls the core directly. learners: the learners behind the link.

    heard_at: time of the last message; None if there was none since the core's start. outer_steps: the run's outer
    steps at that time; None if not known yet.
    """

    name: str
    region: str
    front: bool
    learners: tuple[str, ...] = ()
    heard_at: float | None = None
    outer_steps: float | None = None
    round_trip_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    def state(self, now: float) -> LinkState:
        if self.heard_at is None:
            return LinkState.UNKNOWN
        return LinkState.CONNECTED if now - self.heard_at <= SILENT_S else LinkState.SILENT

    def rates(self, now: float) -> tuple[float, float]:
        """Returns the rates up and down in bytes per second; 0 while the link is silent."""
        return self.traffic.rates(now) if self.state(now) is LinkState.CONNECTED else (0.0, 0.0)

    def budget_s(self, pace: MergePace, now: float) -> float | None:
        """Returns how long the link may be silent, from now on, before work of the learners behind it is discarded.

        Returns None if no work would be discarded because nothing is merged without the learners behind the link.
        """
        if pace.outer_step_s is None or len(pace.live) == sum(name in pace.live for name in self.learners):
            return None
        passed = 0.0
        if self.outer_steps is not None and self.state(now) is LinkState.SILENT:
            passed = pace.outer_steps - self.outer_steps
        return max(0.0, pace.max_staleness - ARRIVAL_STEPS - passed) * pace.outer_step_s
