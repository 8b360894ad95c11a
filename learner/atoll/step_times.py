"""Measures the times of a training loop: inner steps, the time inside `Learner.step`, and deliberate pauses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from atoll_wire.process.clock import Clock

from atoll.stats import Counters


class StepTimes:
    """The times of one training loop. Only the loop's thread may call the methods."""

    def __init__(self, counters: Counters, clock: Clock) -> None:
        self._counters = counters
        self._clock = clock
        self._rests = False
        self._left_at = 0.0  # when the last call of `step` ended, in monotonic seconds
        self._paused_since = 0.0  # seconds of pauses since `_left_at`

    def begin(self) -> None:
        """Records that training begins."""
        self._left_at = self._clock.monotonic()

    def came(self, loss: float | None) -> float:
        """Records that `step` was called, so that an inner step has ended. Returns the time in monotonic seconds."""
        now = self._clock.monotonic()
        self._counters.stepped(now - self._left_at, self._paused_since, loss)
        self._left_at, self._paused_since = now, 0.0
        return now

    def left(self, came_at: float, stood_s: float) -> None:
        """Records that `step` returns.

        came_at: the result of `came`. stood_s: seconds for which `step` waited because the run was paused.
        """
        self._left_at = self._clock.monotonic()
        self._counters.blocked_s += self._left_at - came_at - stood_s

    @contextlib.contextmanager
    def pause(self) -> Iterator[bool]:
        """Context manager for a deliberate pause. Yields whether it is the outermost pause, which counts the time."""
        if self._rests:
            yield False
            return
        began = self._counters.resting_since = self._clock.monotonic()
        self._rests = self._counters.paused = True
        try:
            yield True
        finally:
            self._rests = self._counters.paused = False
            self._counters.resting_since = None
            self._paused_since += self._counters.rested(began, self._clock.monotonic())
