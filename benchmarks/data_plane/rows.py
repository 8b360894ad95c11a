"""Results of `make bench`: rows with limits, and measurements that were not possible."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, with a limit and a note, such as a peer's figure. most: whether the limit is an upper limit."""

    name: str
    value: float
    limit: float
    unit: str
    beside: str = ""
    most: bool = True

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit if self.most else self.value >= self.limit


@dataclass(slots=True)
class Report:
    """The results of one run.

    paces_s: `pace_s` before each part. If the paces differ, the figures of these parts are not comparable.
    """

    rows: list[Row] = field(default_factory=list)
    not_measured: list[dict[str, str]] = field(default_factory=list)
    paces_s: dict[str, float] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        rows = [asdict(row) | {"holds": row.holds} for row in self.rows]
        return {"rows": rows, "not_measured": self.not_measured, "paces_s": self.paces_s}


def pace_s() -> float:
    """Returns the seconds that this machine currently needs for ten million iterations of an empty Python loop."""
    began = time.perf_counter()
    for _ in range(10_000_000):
        pass
    return time.perf_counter() - began
