"""PURE: how long may the next arrival take, by what was seen so far?

The estimate is that of TCP's retransmission timeout (RFC 6298): smoothed gap + 4 x its smoothed deviation. A slow or
uneven link earns itself more patience, a quick and even one less; nobody has to guess.
"""

from __future__ import annotations

GAP_SHARE = 1 / 8
DEVIATION_SHARE = 1 / 4
DEVIATIONS = 4.0


class Arrivals:
    """Of one kind, from one sender. least_s, most_s: bounds of the patience; before a gap was seen it is most_s."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s = least_s
        self._most_s = most_s
        self._at: float | None = None
        self._gap_s: float | None = None
        self._deviation_s = 0.0

    def saw(self, now: float) -> None:
        """One arrived."""
        if self._at is not None:
            self._learn(now - self._at)
        self._at = now

    def again(self, now: float) -> None:
        """Arrivals begin anew, after a break that says nothing of their pace."""
        self._at = now

    def _learn(self, gap_s: float) -> None:
        if self._gap_s is None:
            self._gap_s = gap_s
            self._deviation_s = gap_s / 2
            return
        self._deviation_s += DEVIATION_SHARE * (abs(gap_s - self._gap_s) - self._deviation_s)
        self._gap_s += GAP_SHARE * (gap_s - self._gap_s)

    def patience_s(self) -> float:
        """The longest gap that is still likely."""
        if self._gap_s is None:
            return self._most_s
        return min(self._most_s, max(self._least_s, self._gap_s + DEVIATIONS * self._deviation_s))

    def overdue(self, now: float) -> bool:
        """Whether the next one should have come by now."""
        return self._at is not None and now - self._at > self.patience_s()
