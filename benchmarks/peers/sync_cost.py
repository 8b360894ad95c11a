"""The cost of a peer's sync: seconds, CPU seconds of all its processes, and bytes over loopback.

Bytes are counted at the interface, headers included. Nothing else may use loopback during a sync.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from dataclasses import asdict, dataclass, field

import psutil

from benchmarks.interface_bytes import loopback_bytes


@dataclass(frozen=True, slots=True)
class PeerSync:
    """The cost of several syncs. For each sync: seconds until the workers have the result, CPU seconds, and bytes.

    CPU seconds and bytes include all workers. wire_bytes: empty if they are not counted. server_bytes: peak resident
    memory, if there is a server.
    """

    wall_s: list[float]
    cpu_s: list[float]
    wire_bytes: list[int] = field(default_factory=list)
    server_bytes: int = 0

    def and_then(self, later: PeerSync) -> PeerSync:
        """Returns this measurement, followed by a later one."""
        return PeerSync(
            [*self.wall_s, *later.wall_s],
            [*self.cpu_s, *later.cpu_s],
            [*self.wire_bytes, *later.wire_bytes],
            max(self.server_bytes, later.server_bytes),
        )

    @property
    def median_wall_s(self) -> float:
        """Median wall-clock seconds of a sync."""
        return statistics.median(self.wall_s)

    @property
    def median_cpu_s(self) -> float:
        """Median CPU seconds of a sync."""
        return statistics.median(self.cpu_s)

    @property
    def median_bytes(self) -> float:
        """Median bytes of a sync."""
        return statistics.median(self.wire_bytes)


@dataclass(frozen=True, slots=True)
class CostSoFar:
    """Counters at one moment. cpu_s: sum over all descendants of a process, including ended ones."""

    at_s: float
    cpu_s: float
    wire_bytes: int

    @classmethod
    def of(cls, root: int) -> CostSoFar:
        """Reads the counters now. root: the process whose descendants count. It does not count itself."""
        cpu_s, wire_bytes = below(root), loopback_bytes()
        return cls(time.monotonic(), cpu_s, wire_bytes)

    def data(self) -> dict[str, float]:
        """Returns the fields as JSON values."""
        return asdict(self)


def below(root: int) -> float:
    """Returns the CPU seconds of all descendants of a process."""
    total = 0.0
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def between(accounts: list[CostSoFar]) -> tuple[list[float], list[float], list[int]]:
    """Returns the seconds, CPU seconds and bytes between consecutive counters."""
    pairs = list(itertools.pairwise(accounts))
    walls = [b.at_s - a.at_s for a, b in pairs]
    return walls, [b.cpu_s - a.cpu_s for a, b in pairs], [b.wire_bytes - a.wire_bytes for a, b in pairs]
