"""PURE: growth rates, and time series of bounded size. A full series drops every other point."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

MAX_GAPS = 100

K = TypeVar("K", bound=Hashable)


class History(Generic[K]):
    """Named columns on one time axis. NaN stands for a missing value. most: limit on the number of points.

    seen_at: time of the last measurement. gaps: periods without measurements, as the times of the measurements before
    and after.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._interval_s = 0.0
        self.seen_at = -math.inf
        self.at: array[float] = array("d")
        self.gaps: list[tuple[float, float]] = []
        self._columns: dict[K, array[float]] = {}

    def add(self, at: float, values: Mapping[K, float], *, gap: bool = False) -> None:
        """Adds a point, unless the time since the last point is below the current resolution.

        at: seconds. gap: whether nothing was measured since the last call.
        """
        if gap and self.at:
            self._add_gap((self.seen_at, at))
        elif self.at and at - self.at[-1] < self._interval_s:
            self.seen_at = at
            return
        self.seen_at = at
        for name in values.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan] * len(self.at))
        self.at.append(at)
        for name, column in self._columns.items():
            column.append(values.get(name, math.nan))
        if len(self.at) > self._most:
            self._interval_s = 1.9 * (self.at[-1] - self.at[0]) / len(self.at)
            self.at = self.at[::2]
            self._columns = {name: column[::2] for name, column in self._columns.items()}

    def _add_gap(self, gap: tuple[float, float]) -> None:
        self.gaps.append(gap)
        if len(self.gaps) > MAX_GAPS:  # joins the two closest gaps, so that no line crosses a gap
            first = min(range(MAX_GAPS), key=lambda n: self.gaps[n + 1][0] - self.gaps[n][1])
            self.gaps[first : first + 2] = [(self.gaps[first][0], self.gaps[first + 1][1])]

    def column(self, name: K) -> list[float | None]:
        """Returns a column with one entry per point of the time axis: None where the column has no value."""
        found = self._columns.get(name)
        if found is None:
            return [None] * len(self.at)
        return [value if math.isfinite(value) else None for value in found]

    @classmethod
    def restored(
        cls,
        most: int,
        points: Iterable[tuple[float, Mapping[K, float]]],
        gaps: Iterable[tuple[float, float]],
        seen_at: float,
    ) -> History[K]:
        """Returns a history with these points and gaps."""
        made = cls(most)
        for each_at, values in points:
            made.add(each_at, values)
        made.gaps = list(gaps)
        if len(made.at) > most // 2:  # the saved history had reached its final resolution
            made._interval_s = 0.95 * (made.at[-1] - made.at[0]) / (len(made.at) - 1)
        made.seen_at = seen_at
        return made

    def names(self) -> list[K]:
        """Returns the names of the columns."""
        return list(self._columns)

    def points(self, without: Container[float] = ()) -> Iterator[tuple[float, dict[K, float]]]:
        """Yields the points with their known values. without: times of points to omit."""
        for number, at in enumerate(self.at):
            if at not in without:
                values = ((name, column[number]) for name, column in self._columns.items())
                yield at, {name: value for name, value in values if math.isfinite(value)}


class Rates(Generic[K]):
    """The rates at which named sums grow, over the last window_s seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, Mapping[K, float]]] = deque()

    def add(self, at: float, sums: Mapping[K, float], least_s: float = 0.0) -> None:
        """Adds the current sums. Keeps only the newest of sums less than `least_s` seconds apart. at: seconds."""
        if self._seen and at <= self._seen[-1][0]:
            return
        if len(self._seen) > 1 and at - self._seen[-2][0] < least_s:
            self._seen.pop()
        self._seen.append((at, sums))
        while len(self._seen) > 2 and self._seen[1][0] <= at - self._window_s:
            self._seen.popleft()

    def grown(self, name: K) -> float:
        """Returns how much a sum grew within the window.

        A new sum counts from 0. If a sum fell, as after a restart of the core, the result is 0.
        """
        if len(self._seen) < 2:
            return 0.0
        return max(0.0, self._seen[-1][1].get(name, 0.0) - self._seen[0][1].get(name, 0.0))

    def span_s(self) -> float:
        """Returns the seconds between the oldest and the newest sums: about window_s once the window is full."""
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0

    def rate(self, name: K) -> float:
        """Returns a sum's growth per second."""
        return self.grown(name) / self.span_s() if len(self._seen) > 1 else 0.0


class ReportedRates(Generic[K]):
    """The rates of sums that grow with reports, over at least the last window_s seconds before the last report.

    A report after an outage also contains the growth during the outage, so a rate spans the time between reports.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._grew: dict[K, deque[tuple[float, float]]] = {}  # by name: times of growth, each with the sum

    def add(self, at: float, name: K, total: float) -> None:
        """Adds the current sum. A sum that fell, as after a restart of the core, counts once it exceeds the old sum.

        at: seconds.
        """
        grew = self._grew.setdefault(name, deque([(at, total)]))
        if total > grew[-1][1]:
            grew.append((at, total))
            while len(grew) > 2 and grew[1][0] <= at - self._window_s:
                grew.popleft()

    def rate(self, name: K) -> float | None:
        """Returns a sum's growth per second; None until the sum has grown."""
        grew = self._grew.get(name)
        if grew is None or len(grew) < 2:
            return None
        return (grew[-1][1] - grew[0][1]) / (grew[-1][0] - grew[0][0])
