"""A shard's tables in the ledger: contributions with their fates, merges, and snapshots.

These tables do not depend on the run's tables, which may be in the same file or in another. Functions here read or
write rows within their caller's transaction (see ledger_writer.py).
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from atoll_wire.contract import FATES, Fate

from atoll_server.data.merged_units import MergedUnits, UnitRange
from atoll_server.ledger.database import LedgerError, checksum, verified
from atoll_server.ledger.rows import ContributionRow, FateRow, MergeRow, SnapshotRow, TotalsRow
from atoll_server.rounds.syncer_events import ContributionKey

CONTRIBUTION_COLUMNS, TALLY_COLUMNS, MERGE_COLUMNS = 17, 12, 13  # columns under a row's first checksum

# ------------------------------------------------------------------------------------------------- writing


def add_contribution(
    db: sqlite3.Connection, generation: int, row: ContributionRow, fate: FateRow | None = None
) -> None:
    """Adds a contribution, whose key must be new. fate: None if the contribution is pending."""
    key = row.key
    values = (
        generation,
        key.learner,
        key.incarnation,
        key.fragment,
        key.seq,
        row.cycle,
        row.base_version,
        row.tokens,
        row.steps,
        row.codec,
        row.frames,
        row.size_bytes,
        row.digest.hex(),
        json.dumps(row.norms_sq),
        row.scale,
        row.accepted_at,
        json.dumps([(each.lease, each.after, each.upto) for each in row.units]),
    )
    everything = (*values, checksum(values), *_fate_values(fate or FateRow(key, Fate.PENDING)))
    db.execute(f"INSERT INTO contributions VALUES ({','.join('?' * len(everything))})", everything)  # noqa: S608


def _fate_values(row: FateRow) -> tuple[Any, ...]:
    key = row.key
    fate = (row.fate, row.version, row.weight, float(row.staleness), row.reason, int(row.dropped))
    return (*fate, checksum((*key, *fate)))


def put_fates(db: sqlite3.Connection, generation: int, fates: Sequence[FateRow]) -> None:
    """Writes the fates of contributions, which must all be pending."""
    for row in fates:
        _put_fate(db, generation, row)


def _put_fate(db: sqlite3.Connection, generation: int, row: FateRow) -> None:
    key = row.key
    done = db.execute(
        "UPDATE contributions SET fate=?, version=?, weight=?, staleness=?, reason=?, dropped=?, fate_checksum=? "
        "WHERE generation=? AND learner=? AND incarnation=? AND fragment=? AND seq=? AND fate='pending'",
        (*_fate_values(row), generation, key.learner, key.incarnation, key.fragment, key.seq),
    )
    assert done.rowcount == 1, f"contribution {key} was not pending"


def put_totals(db: sqlite3.Connection, generation: int, row: TotalsRow) -> None:
    values = (
        generation,
        row.learner,
        row.incarnation,
        row.fragment,
        row.through,
        row.merged,
        row.refused,
        str(row.tokens),
        row.size_bytes,
        row.seq,
        row.cycle,
        json.dumps([(lease, merged.as_data()) for lease, merged in row.units.items()]),
    )
    db.execute("INSERT OR REPLACE INTO tallies VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", (*values, checksum(values)))


def add_merge(db: sqlite3.Connection, generation: int, row: MergeRow, fates: Sequence[FateRow]) -> None:
    """Adds a merge and writes the fates of the contributions that it merged or refused."""
    values = (
        generation,
        row.fragment,
        row.version,
        row.cycle,
        json.dumps(row.shares),
        json.dumps(row.rule),
        row.run_tokens,
        row.voided_tokens,
        row.theta,
        row.theta_pub,
        row.momentum,
        row.update_bytes,
        row.merged_at,
    )
    db.execute("INSERT INTO merges VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", (*values, checksum(values)))
    put_fates(db, generation, fates)


def add_snapshot(db: sqlite3.Connection, row: SnapshotRow) -> None:
    """Adds a snapshot, whose file must already be durable."""
    versions, checksums = json.dumps([*row.versions.items()]), json.dumps([*row.checksums.items()])
    values = (
        row.id,
        row.generation,
        versions,
        checksums,
        json.dumps(row.tokens),
        row.taken_at,
        row.size_bytes,
        json.dumps(row.datasets),
    )
    db.execute("INSERT INTO snapshots VALUES (?,?,?,?,?,?,?,?,?)", (*values, checksum(values)))


def drop_snapshot(db: sqlite3.Connection, snapshot_id: int) -> None:
    """Removes a snapshot's row. The caller deletes its file afterwards."""
    db.execute("DELETE FROM snapshots WHERE id=?", (snapshot_id,))


# ------------------------------------------------------------------------------------------------- reading


def contributions(
    db: sqlite3.Connection, generation: int, condition: str = "", values: Sequence[Any] = ()
) -> Iterator[tuple[ContributionRow, FateRow]]:
    """Yields a generation's contributions with their fates. condition: constant SQL, such as "AND fate=?"."""
    query = f"SELECT * FROM contributions WHERE generation=? {condition}"  # noqa: S608 - constants
    return map(_contribution, verified(db.execute(query, (generation, *values)), "contributions", CONTRIBUTION_COLUMNS))


def contribution(
    db: sqlite3.Connection, generation: int, key: ContributionKey
) -> tuple[ContributionRow, FateRow] | None:
    """Returns a contribution with its fate, or None if the ledger lacks it."""
    condition = "AND learner=? AND incarnation=? AND fragment=? AND seq=?"
    return next(contributions(db, generation, condition, (key.learner, key.incarnation, key.fragment, key.seq)), None)


def came_after(
    db: sqlite3.Connection, generation: int, number: int, limit: int = -1
) -> Iterator[tuple[int, ContributionRow, FateRow]]:
    """Yields contributions with numbers above `number`, in order of arrival. limit: -1 for no limit."""
    query = "SELECT *, rowid FROM contributions NOT INDEXED WHERE generation=? AND rowid>? ORDER BY rowid LIMIT ?"
    for r in verified(db.execute(query, (generation, number, limit)), "contributions", CONTRIBUTION_COLUMNS):
        yield (r[-1], *_contribution(r))


def totals(
    db: sqlite3.Connection, generation: int, condition: str = "", values: Sequence[Any] = ()
) -> Iterator[TotalsRow]:
    """Yields a generation's sums, one row per incarnation and fragment. condition: constant SQL."""
    query = f"SELECT * FROM tallies WHERE generation=? {condition}"  # noqa: S608 - constants
    for r in verified(db.execute(query, (generation, *values)), "tallies", TALLY_COLUMNS):
        learner, incarnation, fragment, through, merged, refused, tokens, size_bytes, seq, cycle, units = r[1:12]
        sums = (through, merged, refused, int(tokens), size_bytes, seq, cycle)
        by_lease = {lease: MergedUnits.from_data(each) for lease, each in json.loads(units)}
        yield TotalsRow(learner, incarnation, fragment, *sums, by_lease)


def read_again(db: sqlite3.Connection, number: int, limit: int) -> int:
    """Verifies up to `limit` contributions with numbers above `number`, in all generations.

    Returns the last verified contribution's number, or 0 if there was none. Raises LedgerError if a checksum does not
    match.
    """
    rows = db.execute("SELECT *, rowid FROM contributions WHERE rowid>? ORDER BY rowid LIMIT ?", (number, limit))
    number = 0
    for r in verified(iter(rows.fetchall()), "contributions", CONTRIBUTION_COLUMNS):
        _contribution(r)
        number = r[-1]
    return number


def check_rows(db: sqlite3.Connection) -> None:
    """Verifies the sums and merges of all generations. Raises LedgerError if a checksum does not match."""
    for table, columns in (("tallies", TALLY_COLUMNS), ("merges", MERGE_COLUMNS)):
        for _ in verified(db.execute(f"SELECT * FROM {table}"), table, columns):  # noqa: S608 - constants
            pass


def receipts(
    db: sqlite3.Connection, learner: str, fate: Fate | None, before: int, limit: int
) -> list[tuple[int, ContributionRow, FateRow]]:
    """Returns the newest contributions of all generations, newest first, each with its number.

    Numbers increase in order of arrival. learner: name of a learner; empty for all learners. fate: a fate; None for all
    fates. before: limit that the returned numbers are below; 0 for no limit.
    """
    given = [(text, value) for text, value in (("learner=?", learner), ("rowid<?", before)) if value]
    fates = [f"fate='{each}'" for each in FATES if each == fate]  # the form in which SQLite uses the indices
    conditions = " AND ".join([text for text, _ in given] + fates) or "TRUE"
    query = f"SELECT rowid FROM contributions WHERE {conditions} ORDER BY rowid DESC LIMIT ?"  # noqa: S608 - constants
    found = []
    for (number,) in db.execute(query, (*(value for _, value in given), limit)).fetchall():
        rows = db.execute("SELECT * FROM contributions WHERE rowid=?", (number,))
        found += [(number, *_contribution(r)) for r in verified(rows, "contributions", CONTRIBUTION_COLUMNS)]
    return found


def latest_norms(
    db: sqlite3.Connection, generation: int, fragment: int, to: int, limit: int
) -> list[tuple[str, float, int]]:
    """Returns (learner, norm, steps) of the last contributions to a fragment that were not refused, oldest first.

    to: newest version; contributions merged into later versions are excluded.
    """
    query = (
        "SELECT learner, norms_sq, steps FROM contributions NOT INDEXED WHERE generation=? AND fragment=? "
        "AND fate<>'refused' AND version<=? ORDER BY rowid DESC LIMIT ?"
    )
    rows = db.execute(query, (generation, fragment, to, limit)).fetchall()
    return [(name, math.sqrt(math.fsum(json.loads(norms_sq))), steps) for name, norms_sq, steps in reversed(rows)]


def _contribution(r: Sequence[Any]) -> tuple[ContributionRow, FateRow]:
    key = ContributionKey(r[1], r[2], r[3], r[4])
    cycle, base_version, tokens, steps, codec, frames, size_bytes, digest, norms_sq, scale, accepted_at, units = r[5:17]
    row = ContributionRow(
        key,
        cycle,
        base_version,
        tokens,
        steps,
        codec,
        frames,
        size_bytes,
        bytes.fromhex(digest),
        tuple(json.loads(norms_sq)),
        scale,
        accepted_at,
        tuple(UnitRange(*each) for each in json.loads(units)),
    )
    if checksum((*key, *r[18:24])) != r[24]:
        raise LedgerError(f"the fate of contribution {key} does not match its checksum: restore a backup")
    return row, FateRow(key, Fate(r[18]), r[19], r[20], r[21], r[22], bool(r[23]))


def merges(db: sqlite3.Connection, generation: int, fragment: int, after: int, to: int) -> Iterator[MergeRow]:
    """Yields a generation's merges of a fragment with versions above `after` and up to `to`, oldest first."""
    condition = "WHERE generation=? AND fragment=? AND version>? AND version<=? ORDER BY version"
    return _merges(db, condition, (generation, fragment, after, to))


def newest_merges(db: sqlite3.Connection, generation: int, fragment: int, after: int, to: int) -> Iterator[MergeRow]:
    """Yields the same merges as `merges` but newest first. Rows are read as the iterator advances."""
    condition = "WHERE generation=? AND fragment=? AND version>? AND version<=? ORDER BY version DESC"
    return _merges(db, condition, (generation, fragment, after, to))


def _merges(db: sqlite3.Connection, condition: str, values: Sequence[Any]) -> Iterator[MergeRow]:
    query = f"SELECT * FROM merges {condition}"  # noqa: S608 - constants
    for r in verified(db.execute(query, values), "merges", MERGE_COLUMNS):
        yield MergeRow(r[1], r[2], r[3], tuple(tuple(s) for s in json.loads(r[4])), json.loads(r[5]), *r[6:13])


def snapshots(db: sqlite3.Connection) -> list[SnapshotRow]:
    """Returns the snapshots of all generations, oldest first."""
    rows = db.execute("SELECT * FROM snapshots ORDER BY id")
    return [
        SnapshotRow(
            r[0],
            r[1],
            dict(json.loads(r[2])),
            {at: tuple(each) for at, each in json.loads(r[3])},
            json.loads(r[4]),
            r[5],
            r[6],
            json.loads(r[7]),
        )
        for r in verified(rows, "snapshots", 8)
    ]
