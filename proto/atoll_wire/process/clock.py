"""The clock of cores, fronts and agents. These processes get the clock as an argument, so that tests can replace it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks. Use `monotonic` for durations and deadlines, and `wall` for times that are displayed or stored."""

    def monotonic(self) -> float:
        """Returns the seconds since an arbitrary moment of this machine. The value never decreases."""

    def wall(self) -> float:
        """Returns the seconds since 1970 from the machine's clock, which may jump."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Returns the seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def wall(self) -> float:
        """Returns the seconds of CLOCK_REALTIME."""
        return time.time()


SYSTEM: Clock = SystemClock()
