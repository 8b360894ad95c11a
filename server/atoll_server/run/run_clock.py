"""The wall clock of a run: accounts outlive a process, so their times are of the calendar; but they only go forward.

Within a process it goes on at the pace of the monotonic clock, whatever is done to the machine's own; from one process
to the next it never falls behind what was written down. Both are said, once, when they are seen.
"""

from __future__ import annotations

import structlog
from atoll_wire.process.clock import Clock

log = structlog.get_logger()

JUMP_S = 5.0  # a difference that is worth a word


class RunClock:
    """A Clock whose wall time is the run's: seconds since 1970, roughly; steady exactly."""

    def __init__(self, machine: Clock) -> None:
        self._machine = machine
        self._wall, self._began = machine.wall(), machine.monotonic()
        self._jumped_s = 0.0

    def set(self) -> None:
        """Takes the machine's time again."""
        self._wall, self._began = self._machine.wall(), self._machine.monotonic()

    def wall(self) -> float:
        """Never less than it was before."""
        return self.at(self._machine.monotonic())

    def at(self, now: float) -> float:
        """The time at a moment of the monotonic clock."""
        return self._wall + (now - self._began)

    def monotonic(self) -> float:
        """The machine's."""
        return self._machine.monotonic()

    def begin_after(self, newest: float) -> None:
        """The run was last written to at `newest`."""
        behind_s = newest - self.wall()
        if behind_s > 0:
            self._wall += behind_s
            self._jumped_s = -behind_s
        if behind_s > JUMP_S:
            log.warning("the clock of this machine is behind the run: times go on from the run's", behind_s=behind_s)

    def look(self) -> None:
        """Compares it with the machine's clock."""
        jumped_s = self._machine.wall() - self.wall()
        if abs(jumped_s - self._jumped_s) > JUMP_S:
            log.warning(
                "the clock of this machine jumped: the run's goes on", jumped_s=round(jumped_s - self._jumped_s)
            )
            self._jumped_s = jumped_s
