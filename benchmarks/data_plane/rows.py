"""What every measurement gives: rows that are compared with a limit, and what could not be measured."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. most: the limit is the most that it may be, else the least. beside: what it is to be seen with."""

    name: str
    value: float
    limit: float
    unit: str
    beside: str = ""
    most: bool = True

    @property
    def holds(self) -> bool:
        """Whether the limit is kept."""
        return self.value <= self.limit if self.most else self.value >= self.limit


@dataclass(slots=True)
class Report:
    """Of one run. paces_s: of the machine, by what was measured next; where they differ, so do figures."""

    rows: list[Row] = field(default_factory=list)
    not_measured: list[dict[str, str]] = field(default_factory=list)
    paces_s: dict[str, float] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """As it is written."""
        rows = [asdict(row) | {"holds": row.holds} for row in self.rows]
        return {"rows": rows, "not_measured": self.not_measured, "paces_s": self.paces_s}


def pace_s() -> float:
    """Of this machine at this moment: seconds for ten million turns of an empty loop in Python."""
    began = time.perf_counter()
    for _ in range(10_000_000):
        pass
    return time.perf_counter() - began
