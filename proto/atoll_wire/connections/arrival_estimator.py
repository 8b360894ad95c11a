"""PURE: estimates how long the next arrival may take, from the gaps seen so far.

The estimate follows TCP's retransmission timeout (RFC 6298): smoothed gap + 4 x smoothed deviation. A slow or irregular
link therefore gets a longer timeout than a fast and regular one, without configuration.
"""

from __future__ import annotations

GAP_SHARE = 1 / 8
DEVIATION_SHARE = 1 / 4
DEVIATIONS = 4.0


class ArrivalEstimator:
    """Estimates when the next arrival of one kind from one sender is due.

    least_s, most_s: bounds of `max_wait_s`, which starts at `most_s`.
    """

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._at: float | None = None
        self._gap_s: float | None = None
        self._deviation_s = 0.0

    def saw(self, now: float) -> None:
        """Records an arrival. now: monotonic seconds."""
        if self._at is not None:
            self._learn(now - self._at)
        self._at = now

    def again(self, now: float) -> None:
        """Records that arrivals resume after a pause. The pause does not count as a gap. now: monotonic seconds."""
        self._at = now

    def _learn(self, gap_s: float) -> None:
        if self._gap_s is None:
            self._gap_s = gap_s
            self._deviation_s = gap_s / 2
            return
        self._deviation_s += DEVIATION_SHARE * (abs(gap_s - self._gap_s) - self._deviation_s)
        self._gap_s += GAP_SHARE * (gap_s - self._gap_s)

    def max_wait_s(self) -> float:
        """Returns the longest gap in seconds that is still likely."""
        if self._gap_s is None:
            return self._most_s
        return min(self._most_s, max(self._least_s, self._gap_s + DEVIATIONS * self._deviation_s))

    def overdue(self, now: float) -> bool:
        """Returns whether more than `max_wait_s` has passed since the last arrival."""
        return self._at is not None and now - self._at > self.max_wait_s()
