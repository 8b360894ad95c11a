"""SQLite, the source of truth: learners, contributions and their fates, merges, snapshots.

WAL with synchronous=FULL: a commit is on the disk when it returns. Functions here read or write rows within whatever
transaction their caller holds (see writer.py). Rows carry checksums, verified when they are read back.
"""

from __future__ import annotations

import json
import math
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll_wire.errors import UserError

from atoll_server.disk import DISK, Disk
from atoll_server.events import Key
from atoll_server.rows import ContributionRow, FateRow, LearnerRow, MergeRow, SnapshotRow

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE learners (
    name TEXT PRIMARY KEY, region TEXT NOT NULL, incarnation INTEGER NOT NULL, nonces TEXT NOT NULL,
    account TEXT NOT NULL, evicted TEXT NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE contributions (
    generation INTEGER NOT NULL, learner TEXT NOT NULL, incarnation INTEGER NOT NULL, fragment INTEGER NOT NULL,
    seq INTEGER NOT NULL, cycle INTEGER NOT NULL, base_version INTEGER NOT NULL, tokens INTEGER NOT NULL,
    steps INTEGER NOT NULL, codec INTEGER NOT NULL, frames INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    digest TEXT NOT NULL, norms_sq TEXT NOT NULL, scale REAL NOT NULL, accepted_at REAL NOT NULL,
    checksum INTEGER NOT NULL, fate TEXT NOT NULL, version INTEGER NOT NULL, weight REAL NOT NULL,
    staleness INTEGER NOT NULL, reason TEXT NOT NULL, dropped INTEGER NOT NULL, fate_checksum INTEGER NOT NULL,
    PRIMARY KEY (generation, learner, incarnation, fragment, seq)) STRICT;
CREATE INDEX contributions_by_version ON contributions (generation, fragment, version);
CREATE INDEX contributions_by_learner ON contributions (learner);
CREATE TABLE merges (
    generation INTEGER NOT NULL, fragment INTEGER NOT NULL, version INTEGER NOT NULL, cycle INTEGER NOT NULL,
    shares TEXT NOT NULL, rule TEXT NOT NULL, theta INTEGER NOT NULL, theta_pub INTEGER NOT NULL,
    momentum INTEGER NOT NULL, update_bytes INTEGER NOT NULL, merged_at REAL NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (generation, fragment, version)) STRICT;
CREATE TABLE snapshots (
    id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, versions TEXT NOT NULL, checksums TEXT NOT NULL,
    taken_at REAL NOT NULL, size_bytes INTEGER NOT NULL, checksum INTEGER NOT NULL) STRICT;
"""


class LedgerError(UserError):
    """The ledger is damaged, locked, or of another version; one line with the remedy."""


def open_ledger(path: Path, disk: Disk = DISK) -> sqlite3.Connection:
    """Opens or creates the database; LedgerError when it is damaged or of another schema."""
    try:
        db = disk.connect(path)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        elif found != SCHEMA_VERSION:
            raise LedgerError(
                f"{path} has schema {found}, this atoll reads {SCHEMA_VERSION}: use the version that made it"
            )
        broken = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if broken != "ok":
            raise LedgerError(f"{path} is damaged ({' '.join(broken.split())}): restore the directory from a backup")
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{path} cannot be used as a ledger ({error}): restore it from a backup") from error
    return db


# ------------------------------------------------------------------------------------------------- writing


def put_meta(db: sqlite3.Connection, key: str, value: Any) -> None:  # noqa: ANN401
    """Sets a value of the run."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


def put_learner(db: sqlite3.Connection, row: LearnerRow) -> None:
    """Adds a learner or brings its row up to date."""
    values = (row.name, row.region, row.incarnation, json.dumps(row.nonces), json.dumps(row.account), row.evicted)
    db.execute("INSERT OR REPLACE INTO learners VALUES (?,?,?,?,?,?,?)", (*values, _checksum(values)))


def add_contribution(
    db: sqlite3.Connection, generation: int, row: ContributionRow, fate: FateRow | None = None
) -> None:
    """Adds a contribution, pending or with its end; its key must be new."""
    key = row.key
    values = (generation, key.learner, key.incarnation, key.fragment, key.seq, row.cycle, row.base_version, row.tokens,
              row.steps, row.codec, row.frames, row.size_bytes, row.digest.hex(), json.dumps(row.norms_sq),
              row.scale, row.accepted_at)  # fmt: skip
    everything = (*values, _checksum(values), *_fate_values(fate or FateRow(key, "pending")))
    db.execute(f"INSERT INTO contributions VALUES ({','.join('?' * len(everything))})", everything)  # noqa: S608


def _fate_values(row: FateRow) -> tuple[Any, ...]:
    key = row.key
    fate = (row.fate, row.version, row.weight, row.staleness, row.reason, int(row.dropped))
    return (*fate, _checksum((key.learner, key.incarnation, key.fragment, key.seq, *fate)))


def put_fates(db: sqlite3.Connection, generation: int, fates: Sequence[FateRow]) -> None:
    """Ends pending contributions. They must be pending: a receipt is given once."""
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


def add_merge(db: sqlite3.Connection, generation: int, row: MergeRow, fates: Sequence[FateRow]) -> None:
    """Logs an outer step with the fates that it decided."""
    values = (generation, row.fragment, row.version, row.cycle, json.dumps(row.shares), json.dumps(row.rule),
              row.theta, row.theta_pub, row.momentum, row.update_bytes, row.merged_at)  # fmt: skip
    db.execute("INSERT INTO merges VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", (*values, _checksum(values)))
    put_fates(db, generation, fates)


def add_snapshot(db: sqlite3.Connection, generation: int, row: SnapshotRow) -> None:
    """Commits that a state file covers these versions."""
    values = (row.id, generation, json.dumps(row.versions), json.dumps(row.checksums), row.taken_at, row.size_bytes)
    db.execute("INSERT INTO snapshots VALUES (?,?,?,?,?,?,?)", (*values, _checksum(values)))


def drop_snapshot(db: sqlite3.Connection, snapshot_id: int) -> None:
    """Forgets a snapshot whose file is about to go."""
    db.execute("DELETE FROM snapshots WHERE id=?", (snapshot_id,))


# ------------------------------------------------------------------------------------------------- reading


def get_meta(db: sqlite3.Connection) -> dict[str, Any]:
    """All values of the run."""
    return {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM meta")}


def learners(db: sqlite3.Connection) -> list[LearnerRow]:
    """Every learner, by name."""
    rows = db.execute("SELECT * FROM learners ORDER BY name")
    return [
        LearnerRow(r[0], r[1], r[2], json.loads(r[3]), json.loads(r[4]), r[5]) for r in _verified(rows, "learners", 6)
    ]


def contributions(
    db: sqlite3.Connection, generation: int, condition: str = "", values: Sequence[Any] = ()
) -> Iterator[tuple[ContributionRow, FateRow]]:
    """Contributions of a generation in key order, with their fates. condition: constant SQL, such as "AND fate=?"."""
    query = f"SELECT * FROM contributions WHERE generation=? {condition} ORDER BY learner, incarnation, fragment, seq"  # noqa: S608
    return _contributions(db.execute(query, (generation, *values)))


def receipts(
    db: sqlite3.Connection, learner: str, fate: str, before: int, limit: int
) -> list[tuple[int, ContributionRow, FateRow]]:
    """The latest contributions of all generations, newest first, each with a number that grows as they came.

    learner, fate: only theirs; empty: all. before: only lower numbers; 0: from the newest on.
    """
    given = [(text, value) for text, value in (("learner=?", learner), ("fate=?", fate), ("rowid<?", before)) if value]
    conditions = " AND ".join(text for text, _ in given) or "TRUE"
    query = f"SELECT rowid FROM contributions WHERE {conditions} ORDER BY rowid DESC LIMIT ?"  # noqa: S608 - constants
    found = []
    for (number,) in db.execute(query, (*(value for _, value in given), limit)).fetchall():
        rows = _contributions(db.execute("SELECT * FROM contributions WHERE rowid=?", (number,)))
        found += [(number, row, end) for row, end in rows]
    return found


def latest_norms(db: sqlite3.Connection, generation: int, fragment: int, limit: int) -> list[tuple[float, int]]:
    """Norm and steps of the last contributions to a fragment that had finite values, oldest first."""
    query = (
        "SELECT norms_sq, steps FROM contributions WHERE generation=? AND fragment=? AND norms_sq<>'[]' "
        "ORDER BY rowid DESC LIMIT ?"
    )
    rows = db.execute(query, (generation, fragment, limit)).fetchall()
    return [(math.sqrt(math.fsum(json.loads(norms_sq))), steps) for norms_sq, steps in reversed(rows)]


def _contributions(found: Iterator[Any]) -> Iterator[tuple[ContributionRow, FateRow]]:
    for r in _verified(found, "contributions", 16):
        key = Key(r[1], r[2], r[3], r[4])
        cycle, base_version, tokens, steps, codec, frames, size_bytes, digest, norms_sq, scale, accepted_at = r[5:16]
        row = ContributionRow(
            key, cycle, base_version, tokens, steps, codec, frames, size_bytes,
            bytes.fromhex(digest), tuple(json.loads(norms_sq)), scale, accepted_at,
        )  # fmt: skip
        fate = FateRow(key, r[17], r[18], r[19], r[20], r[21], bool(r[22]))
        if _fate_values(fate)[-1] != r[23]:
            raise LedgerError(f"the fate of contribution {key} does not match its checksum: restore a backup")
        yield row, fate


def merges(db: sqlite3.Connection, generation: int, fragment: int, after: int) -> list[MergeRow]:
    """Outer steps of a fragment beyond version `after`, in order and without a gap."""
    query = "SELECT * FROM merges WHERE generation=? AND fragment=? AND version>? ORDER BY version"
    rows = [
        MergeRow(r[1], r[2], r[3], tuple(tuple(s) for s in json.loads(r[4])), json.loads(r[5]), *r[6:11])
        for r in _verified(db.execute(query, (generation, fragment, after)), "merges", 11)
    ]
    for offset, row in enumerate(rows, start=1):
        if row.version != after + offset:
            raise LedgerError(f"the ledger lacks version {after + offset} of fragment {fragment}: restore a backup")
    return rows


def last_merged_at(db: sqlite3.Connection, generation: int, fragments: int) -> list[float | None]:
    """Wall-clock seconds of each fragment's newest merge; None when it has none."""
    query = "SELECT merged_at FROM merges WHERE generation=? AND fragment=? ORDER BY version DESC LIMIT 1"
    rows = (db.execute(query, (generation, fragment)).fetchone() for fragment in range(fragments))
    return [row[0] if row is not None else None for row in rows]


def last_cycles(db: sqlite3.Connection, generation: int, fragments: int) -> list[int]:
    """The highest cycle known of each fragment, merged or answered: cycles never repeat."""
    cycles = [0] * fragments
    for table in ("merges", "contributions"):
        query = f"SELECT fragment, max(cycle) FROM {table} WHERE generation=? GROUP BY fragment"  # noqa: S608
        for fragment, cycle in db.execute(query, (generation,)):
            cycles[fragment] = max(cycles[fragment], cycle)
    return cycles


def snapshots(db: sqlite3.Connection, generation: int) -> list[SnapshotRow]:
    """Snapshots of a generation, oldest first."""
    rows = db.execute("SELECT * FROM snapshots WHERE generation=? ORDER BY id", (generation,))
    return [
        SnapshotRow(r[0], tuple(json.loads(r[2])), tuple(tuple(c) for c in json.loads(r[3])), r[4], r[5])
        for r in _verified(rows, "snapshots", 6)
    ]


def _checksum(values: Sequence[Any]) -> int:
    return zlib.crc32(json.dumps(values).encode())


def _verified(rows: Iterator[Any], table: str, columns: int) -> Iterator[Any]:
    for row in rows:
        if _checksum(row[:columns]) != row[columns]:
            raise LedgerError(f"a row of {table} does not match its checksum ({row[:5]}): restore a backup")
        yield row
