"""What a peer's sync costs: seconds, processor seconds of all its processes, and bytes over loopback.

The bytes are of the interface, headers included, so nothing else may use loopback at the time.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.loopback import loopback_bytes

TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class PeerSync:
    """Of each sync: seconds until the workers had it, processor seconds of all of them, bytes of all of them.

    wire_bytes: empty where they are not counted; server_bytes: peak resident memory, where there is a server.
    """

    wall_s: list[float]
    cpu_s: list[float]
    wire_bytes: list[int] = field(default_factory=list)
    server_bytes: int = 0

    @property
    def median_wall_s(self) -> float:
        """Of the syncs."""
        return statistics.median(self.wall_s)

    @property
    def median_cpu_s(self) -> float:
        """Of the syncs."""
        return statistics.median(self.cpu_s)

    @property
    def median_bytes(self) -> float:
        """Of the syncs."""
        return statistics.median(self.wire_bytes)


@dataclass(frozen=True, slots=True)
class Account:
    """At one moment. cpu_s: of everything that runs below a process, and of what ended there."""

    at_s: float
    cpu_s: float
    wire_bytes: int

    @classmethod
    def of(cls, root: int) -> Account:
        """Now. root: a process that is not counted itself."""
        cpu_s, wire_bytes = below(processes(), root), loopback_bytes()
        return cls(time.monotonic(), cpu_s, wire_bytes)

    def data(self) -> dict[str, float]:
        """As it is written."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc. cpu_s: its own and of its children that ended."""

    pid: int
    parent: int
    cpu_s: float


def parsed(stat: str) -> Process:
    """Of the text of /proc/PID/stat; the name may have spaces and brackets in it."""
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    return Process(int(head.split()[0]), int(fields[1]), sum(map(int, fields[11:15])) / TICK)


def processes() -> list[Process]:
    """All that can be read."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            found.append(parsed(place.read_text()))
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return found


def below(found: list[Process], root: int) -> float:
    """Processor seconds of all descendants of a process."""
    children = defaultdict(list)
    for process in found:
        children[process.parent].append(process)
    total, left = 0.0, [*children[root]]
    while left:
        process = left.pop()
        total += process.cpu_s
        left += children[process.pid]
    return total


def between(accounts: list[Account]) -> tuple[list[float], list[float], list[int]]:
    """Of neighbours: seconds, processor seconds and bytes."""
    pairs = list(itertools.pairwise(accounts))
    walls = [b.at_s - a.at_s for a, b in pairs]
    return walls, [b.cpu_s - a.cpu_s for a, b in pairs], [b.wire_bytes - a.wire_bytes for a, b in pairs]
