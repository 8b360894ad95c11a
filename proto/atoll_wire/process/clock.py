"""The clock that a process is given when it starts, and passes down to whatever reads the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two times. Durations and deadlines use `monotonic`; `wall` is for people and for what outlives a process."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment. They never go back, and only this process can compare them."""

    def wall(self) -> float:
        """Seconds since 1970, as the machine tells them: they may jump."""


class SystemClock:
    """The machine's clock. Atoll reads it nowhere else."""

    def monotonic(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds of CLOCK_REALTIME."""
        return time.time()


SYSTEM: Clock = SystemClock()
