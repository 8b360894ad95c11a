"""Divides the rows of several shards' ledgers among other ledgers, by fragment.

Rows keep their bytes and checksums, except that sums get a new `through`, since contributions are numbered by their
order in a ledger. Functions here run within a transaction of each target.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll_server.ledger import shard_ledger
from atoll_server.ledger.database import LedgerError, verified

FRAGMENT, ACCEPTED_AT = 3, 15  # columns of the table contributions


def divide_rows(
    sources: Sequence[sqlite3.Connection],
    owners: Mapping[int, sqlite3.Connection],
    generation: int,
) -> None:
    """Copies contributions, sums and merges to the ledgers that own their fragments. These tables must be empty there.

    owners: ledger of each fragment's target. generation: the run's current generation. Raises LedgerError if a row does
    not match its checksum.
    """
    through = [_summed(db, generation) for db in sources]
    _copy_contributions(sources, through, owners, summed=True)
    last = {
        id(db): db.execute("SELECT coalesce(max(rowid), 0) FROM contributions").fetchone()[0] for db in owners.values()
    }
    _copy_contributions(sources, through, owners, summed=False)
    for source in sources:
        for row in shard_ledger.totals(source, generation):
            target = owners[row.fragment]
            shard_ledger.put_totals(target, generation, replace(row, through=last[id(target)]))
        for merge in verified(source.execute("SELECT * FROM merges"), "merges", shard_ledger.MERGE_COLUMNS):
            owners[merge[1]].execute(f"INSERT INTO merges VALUES ({_marks(merge)})", merge)  # noqa: S608 - marks


def _summed(db: sqlite3.Connection, generation: int) -> int:
    """Returns the number of the last contribution that a ledger's sums include."""
    return max((row.through for row in shard_ledger.totals(db, generation)), default=0)


def _copy_contributions(
    sources: Sequence[sqlite3.Connection],
    through: Sequence[int],
    owners: Mapping[int, sqlite3.Connection],
    *,
    summed: bool,
) -> None:
    """Copies either the contributions that the sums include or all others, in order of arrival.

    The order within each source ledger is kept, even if its clock was once set back.
    """
    streams = [_numbered(db, number, summed=summed) for db, number in zip(sources, through, strict=True)]
    for row in heapq.merge(*streams, key=lambda row: row[ACCEPTED_AT]):
        owners[row[FRAGMENT]].execute(f"INSERT INTO contributions VALUES ({_marks(row)})", row)  # noqa: S608 - marks


def _numbered(db: sqlite3.Connection, through: int, *, summed: bool) -> Iterator[Sequence[Any]]:
    comparison = "<=" if summed else ">"
    rows = db.execute(f"SELECT * FROM contributions WHERE rowid{comparison}? ORDER BY rowid", (through,))  # noqa: S608
    return verified(rows, "contributions", shard_ledger.CONTRIBUTION_COLUMNS)


def _marks(row: Sequence[Any]) -> str:
    return ",".join("?" * len(row))


def count_rows(db: sqlite3.Connection) -> tuple[int, int, int]:
    """Returns the numbers of contributions, of pending contributions and of merges in a ledger."""
    queries = ("contributions", "contributions WHERE fate='pending'", "merges")
    contributions, pending, merges = (db.execute(f"SELECT count(*) FROM {each}").fetchone()[0] for each in queries)  # noqa: S608
    return contributions, pending, merges


def check_counts(sources: Sequence[sqlite3.Connection], targets: Sequence[sqlite3.Connection]) -> None:
    """Raises LedgerError unless the targets together contain as many rows as the sources."""
    before, after = (tuple(map(sum, zip(*map(count_rows, group), strict=True))) for group in (sources, targets))
    if before != after:
        raise LedgerError(
            f"the new ledgers have {', '.join(map(str, after))} rows (contributions, pending, merges), but the old "
            f"ledgers have {', '.join(map(str, before))}: check the disk, and run the command again"
        )
