"""The clock of a process. The process passes it to all code that reads the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks. Use `monotonic` for durations and deadlines, and `wall` for people and for stored data."""

    def monotonic(self) -> float:
        """Returns the seconds since an arbitrary moment. They never decrease. Compare them only in this process."""

    def wall(self) -> float:
        """Returns the seconds since 1970 from the machine's clock, which may jump."""


class SystemClock:
    """The machine's clock. Only this class reads it."""

    def monotonic(self) -> float:
        """Returns the seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def wall(self) -> float:
        """Returns the seconds of CLOCK_REALTIME."""
        return time.time()


SYSTEM: Clock = SystemClock()
