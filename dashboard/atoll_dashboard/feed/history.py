"""PURE: growth rates, and time series of bounded size. A full series drops every other point."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

MAX_POINTS = 480

K = TypeVar("K", bound=Hashable)


class History(Generic[K]):
    """Named columns on one time axis. NaN stands for a missing value. most: limit on the number of points."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._most = most
        self._interval_s = 0.0
        self.at: array[float] = array("d")
        self._columns: dict[K, array[float]] = {}

    def add(self, at: float, values: Mapping[K, float]) -> None:
        """Adds a point, unless the time since the last point is below the current resolution. at: seconds."""
        if self.at and at - self.at[-1] < self._interval_s:
            return
        for name in values.keys() - self._columns.keys():
            self._columns[name] = array("d", [math.nan] * len(self.at))
        self.at.append(at)
        for name, column in self._columns.items():
            column.append(values.get(name, math.nan))
        if len(self.at) > self._most:
            self._interval_s = 1.9 * (self.at[-1] - self.at[0]) / len(self.at)
            self.at = self.at[::2]
            self._columns = {name: column[::2] for name, column in self._columns.items()}

    def column(self, name: K) -> list[float | None]:
        """Returns a column with one entry per point of the time axis: None where the column has no value."""
        found = self._columns.get(name)
        if found is None:
            return [None] * len(self.at)
        return [value if math.isfinite(value) else None for value in found]


class Rates(Generic[K]):
    """The rates at which named sums grow, over the last window_s seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, Mapping[K, float]]] = deque()

    def add(self, at: float, sums: Mapping[K, float], least_s: float = 0.0) -> None:
        """Adds the current sums, unless the previous sums are at most `least_s` seconds older. at: seconds."""
        if self._seen and at <= self._seen[-1][0] + least_s:
            return
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
