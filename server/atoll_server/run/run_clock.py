"""The run's wall clock, which never goes backwards. Learners' accounts, which outlive the core's process, use it.

Within a process, the run's clock follows the machine's monotonic clock, even if the machine's wall clock is changed.
After a restart, the run's clock does not start before the last saved time. Each jump of the machine's clock is logged
once.
"""

from __future__ import annotations

import structlog
from atoll_wire.process.clock import Clock

log = structlog.get_logger()

JUMP_S = 5.0  # differences between the two clocks above this many seconds are logged


class RunClock:
    """A Clock whose wall time advances steadily and is approximately the number of seconds since 1970."""

    def __init__(self, machine: Clock) -> None:
        self._machine = machine
        self._wall = machine.wall()
        self._began = machine.monotonic()
        self._jumped_s = 0.0

    def set(self) -> None:
        """Sets the clock to the machine's wall clock."""
        self._wall, self._began = self._machine.wall(), self._machine.monotonic()

    def wall(self) -> float:
        """Returns the run's time in seconds, which never decreases."""
        return self.at(self._machine.monotonic())

    def at(self, now: float) -> float:
        """Returns the run's time at a given moment. now: monotonic seconds."""
        return self._wall + (now - self._began)

    def monotonic(self) -> float:
        return self._machine.monotonic()

    def begin_after(self, newest: float) -> None:
        """Moves the clock forward to `newest`, which is the last saved time, if the clock is behind that time."""
        behind_s = newest - self.wall()
        if behind_s > 0:
            self._wall += behind_s
            self._jumped_s = -behind_s
        if behind_s > JUMP_S:
            log.warning(
                "this machine's clock is behind the run's: the run continues from its last saved time; check NTP",
                behind_s=behind_s,
            )

    def look(self) -> None:
        """Logs a warning if the machine's wall clock has jumped by more than JUMP_S since the last warning."""
        jumped_s = self._machine.wall() - self.wall()
        if abs(jumped_s - self._jumped_s) > JUMP_S:
            log.warning(
                "this machine's clock jumped: the run keeps its own time; check NTP",
                jumped_s=round(jumped_s - self._jumped_s),
            )
            self._jumped_s = jumped_s
