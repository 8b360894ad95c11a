"""Reads a generation's history: the generation that made each version of a fragment, and the rows of these versions.

A run that is restored to a checkpoint begins a new generation. Up to this checkpoint, the new generation shares the
history of the generation that took it. That generation's later work is not part of the new generation's history.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from atoll_server.ledger import shard_ledger
from atoll_server.ledger.database import LedgerError
from atoll_server.ledger.rows import ContributionRow, FateRow, MergeRow, SnapshotRow

META = "generations"  # the ledger stores the beginnings of all generations after the first under this key
LAST = (1 << 63) - 1  # a version that no fragment reaches


@dataclass(frozen=True, slots=True)
class Beginning:
    """A generation's beginning at a checkpoint of its parent.

    versions: version of each fragment in the checkpoint. epoch: epoch of the last core before the restore. at: time of
    the restore in wall-clock seconds, for people. backup_at: time of the backup from which the run was restored; 0
    without a backup.
    """

    generation: int
    parent: int
    checkpoint: int
    versions: dict[int, int]
    epoch: int
    at: float
    backup_at: float = 0.0

    def as_data(self) -> dict[str, Any]:
        """Returns JSON values for the ledger."""
        return asdict(self) | {"versions": [*self.versions.items()]}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Beginning:
        return cls(**(data | {"versions": dict(data["versions"])}))


@dataclass(frozen=True, slots=True)
class Line:
    """A generation with its history.

    beginnings: beginnings of all generations after the first in this history, newest first.
    """

    generation: int = 1
    beginnings: tuple[Beginning, ...] = ()

    def spans(self, fragment: int, after: int = 0, to: int = LAST) -> list[tuple[int, int, int]]:
        """Returns which generations made a fragment's versions above `after` and up to `to`, oldest first.

        Each item is (generation, after, to), where `after` and `to` have the same meaning as the arguments.
        """
        found: list[tuple[int, int, int]] = []
        generation = self.generation
        for begun in self.beginnings:
            first = begun.versions[fragment]
            found.append((generation, max(after, first), to))
            generation = begun.parent
            to = min(to, first)
        found.append((generation, after, to))
        return [span for span in reversed(found) if span[1] < span[2]]

    def has(self, row: SnapshotRow) -> bool:
        """Returns whether a checkpoint belongs to this history. Otherwise, a restore discarded its work."""
        generation = self.generation
        newest: float = math.inf
        for begun in self.beginnings:
            if row.generation == generation:
                break
            generation = begun.parent
            newest = begun.checkpoint
        return row.generation == generation and row.id <= newest


def line_of(meta: dict[str, Any], generation: int | None = None) -> Line:
    """Returns a generation's history, from the run's values in the ledger. generation: None for the current one."""
    begun = {each["generation"]: Beginning.from_data(each) for each in meta.get(META, [])}
    wanted = meta["generation"] if generation is None else generation
    beginnings: list[Beginning] = []
    parent = wanted
    while parent in begun:
        beginnings.append(begun[parent])
        parent = begun[parent].parent
    return Line(wanted, tuple(beginnings))


def snapshots(db: sqlite3.Connection, line: Line) -> list[SnapshotRow]:
    """Returns this history's snapshots, oldest first."""
    return [row for row in shard_ledger.snapshots(db) if line.has(row)]


def merges(db: sqlite3.Connection, line: Line, fragment: int, after: int) -> list[tuple[int, MergeRow]]:
    """Returns a fragment's merges above version `after`, each with its generation, in order.

    Raises LedgerError if a merge is missing.
    """
    found = [
        (generation, row)
        for generation, start, to in line.spans(fragment, after)
        for row in shard_ledger.merges(db, generation, fragment, start, to)
    ]
    wanted = max((span[1] for span in line.spans(fragment, after)), default=after) - after
    for offset in range(1, max(wanted, len(found)) + 1):
        if offset > len(found) or found[offset - 1][1].version != after + offset:
            raise LedgerError(f"the ledger lacks version {after + offset} of fragment {fragment}: restore a backup")
    return found


def last_merge(db: sqlite3.Connection, line: Line, fragment: int) -> tuple[int, float | None]:
    """Returns the cycle and wall-clock time of a fragment's newest merge, or (0, None) if there is no merge."""
    newest = next(_newest_merges(db, line, fragment), None)
    return (0, None) if newest is None else (newest.cycle, newest.merged_at)


def ages(db: sqlite3.Connection, line: Line, fragment: int, steps: float) -> dict[int, float]:
    """Returns the age, in outer steps, of each version from a fragment's last `steps` outer steps, oldest first."""
    found: dict[int, float] = {}
    for row in _newest_merges(db, line, fragment):
        age = float(row.rule["age"])
        if found and next(iter(found.values())) - age > steps:
            return dict(reversed(found.items()))
        found[row.version] = age
    return {0: 0.0} | dict(reversed(found.items()))


def merged(
    db: sqlite3.Connection, line: Line, fragment: int, after: int, to: int = LAST
) -> Iterator[tuple[int, ContributionRow, FateRow]]:
    """Yields contributions merged into a fragment's versions above `after` and up to `to`, each with its generation."""
    condition = "AND fragment=? AND fate='merged' AND version>? AND version<=?"
    for generation, start, end in line.spans(fragment, after, to):
        for row, fate in shard_ledger.contributions(db, generation, condition, (fragment, start, end)):
            yield generation, row, fate


def latest_norms(db: sqlite3.Connection, line: Line, fragment: int, limit: int) -> list[tuple[str, float, int]]:
    """Returns (learner, norm, steps) of the last contributions to a fragment that were not refused, oldest first."""
    found: list[tuple[str, float, int]] = []
    for generation, _, to in reversed(line.spans(fragment)):
        if len(found) < limit:
            found = shard_ledger.latest_norms(db, generation, fragment, to, limit - len(found)) + found
    return found


def _newest_merges(db: sqlite3.Connection, line: Line, fragment: int) -> Iterator[MergeRow]:
    for generation, after, to in reversed(line.spans(fragment)):
        yield from shard_ledger.newest_merges(db, generation, fragment, after, to)
