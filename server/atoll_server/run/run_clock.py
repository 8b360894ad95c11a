"""A run's wall clock. Accounts outlive a process, so they need wall-clock times that never decrease.

Within a process, the clock runs at the monotonic clock's pace, even if the machine's clock is set. From one process to
the next, it never falls behind the last saved time. Each difference is logged once, when it is noticed.
"""

from __future__ import annotations

import structlog
from atoll_wire.process.clock import Clock

log = structlog.get_logger()

JUMP_S = 5.0  # larger differences are logged


class RunClock:
    """A Clock with the run's wall time: approximately the seconds since 1970, at a steady pace."""

    def __init__(self, machine: Clock) -> None:
        self._machine = machine
        self._wall = machine.wall()
        self._began = machine.monotonic()
        self._jumped_s = 0.0

    def set(self) -> None:
        """Sets the clock to the machine's wall clock."""
        self._wall, self._began = self._machine.wall(), self._machine.monotonic()

    def wall(self) -> float:
        """Returns the seconds on the run's clock, which never decrease."""
        return self.at(self._machine.monotonic())

    def at(self, now: float) -> float:
        """Returns the run's time at a given moment. now: monotonic seconds."""
        return self._wall + (now - self._began)

    def monotonic(self) -> float:
        """Returns the machine's monotonic seconds."""
        return self._machine.monotonic()

    def begin_after(self, newest: float) -> None:
        """Moves the clock to `newest`, the last saved time, if the clock is behind this time."""
        behind_s = newest - self.wall()
        if behind_s > 0:
            self._wall += behind_s
            self._jumped_s = -behind_s
        if behind_s > JUMP_S:
            log.warning(
                "this machine's clock is behind the run's: the run continues from its last saved time",
                behind_s=behind_s,
            )

    def look(self) -> None:
        """Compares this clock with the machine's, and logs a new jump of more than JUMP_S."""
        jumped_s = self._machine.wall() - self.wall()
        if abs(jumped_s - self._jumped_s) > JUMP_S:
            log.warning(
                "this machine's clock jumped: the run keeps its own time",
                jumped_s=round(jumped_s - self._jumped_s),
            )
            self._jumped_s = jumped_s
