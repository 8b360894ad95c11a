"""A clock that a test sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SetClock:
    """A clock that changes only when the test sets it. steady: monotonic seconds. at: seconds since 1970."""

    steady: float = 0.0
    at: float = 0.0

    def monotonic(self) -> float:
        return self.steady

    def wall(self) -> float:
        return self.at
