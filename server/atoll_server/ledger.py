"""SQLite, the source of truth: learners, contributions and their fates, merges, snapshots.

WAL with synchronous=FULL: a commit is on the disk when it returns. Functions here read or write rows within whatever
transaction their caller holds (see writer.py). Rows carry checksums, verified when they are read back.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll_wire.errors import UserError

from atoll_server.disk import DISK, Disk
from atoll_server.events import Key

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE learners (
    name TEXT PRIMARY KEY, region TEXT NOT NULL, incarnation INTEGER NOT NULL, nonces TEXT NOT NULL,
    account TEXT NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE contributions (
    generation INTEGER NOT NULL, learner TEXT NOT NULL, incarnation INTEGER NOT NULL, fragment INTEGER NOT NULL,
    seq INTEGER NOT NULL, cycle INTEGER NOT NULL, base_version INTEGER NOT NULL, tokens INTEGER NOT NULL,
    steps INTEGER NOT NULL, codec INTEGER NOT NULL, frames INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    digest TEXT NOT NULL, norms_sq TEXT NOT NULL, checksum INTEGER NOT NULL,
    fate TEXT NOT NULL, version INTEGER, weight REAL, staleness INTEGER, reason TEXT, dropped INTEGER,
    PRIMARY KEY (generation, learner, incarnation, fragment, seq)) STRICT;
CREATE INDEX contributions_by_version ON contributions (generation, fragment, version);
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


@dataclass(frozen=True, slots=True)
class ContributionRow:
    """What never changes about an acknowledged contribution."""

    key: Key
    cycle: int
    base_version: int
    tokens: int
    steps: int
    codec: int
    frames: int
    size_bytes: int
    digest: bytes
    norms_sq: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FateRow:
    """The end of a contribution. fate: pending, merged, refused."""

    key: Key
    fate: str
    version: int = 0
    weight: float = 0.0
    staleness: int = 0
    reason: str = ""
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class MergeRow:
    """One outer step. shares: (learner, incarnation, seq, weight, staleness), in merge order. Checksums: CRC-32C."""

    fragment: int
    version: int
    cycle: int
    shares: tuple[tuple[str, int, int, float, int], ...]
    rule: dict[str, Any]
    theta: int
    theta_pub: int
    momentum: int
    update_bytes: int
    merged_at: float


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A state file that covers these versions. checksums: (theta, theta_pub, momentum) of each fragment."""

    id: int
    versions: tuple[int, ...]
    checksums: tuple[tuple[int, int, int], ...]
    taken_at: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """A name that this run has seen."""

    name: str
    region: str
    incarnation: int
    nonces: list[int]
    account: dict[str, Any]


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
            raise LedgerError(f"{path} is damaged ({broken}): restore the directory from a backup")
    except sqlite3.DatabaseError as error:
        raise LedgerError(f"{path} cannot be used as a ledger ({error}): restore it from a backup") from error
    return db


# ------------------------------------------------------------------------------------------------- writing


def put_meta(db: sqlite3.Connection, key: str, value: Any) -> None:  # noqa: ANN401
    """Sets a value of the run."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


def put_learner(db: sqlite3.Connection, row: LearnerRow) -> None:
    """Adds a learner or brings its row up to date."""
    values = (row.name, row.region, row.incarnation, json.dumps(row.nonces), json.dumps(row.account))
    db.execute("INSERT OR REPLACE INTO learners VALUES (?,?,?,?,?,?)", (*values, _checksum(values)))


def add_contribution(db: sqlite3.Connection, generation: int, row: ContributionRow) -> None:
    """Adds a pending contribution; its key must be new."""
    key = row.key
    values = (generation, key.learner, key.incarnation, key.fragment, key.seq, row.cycle, row.base_version, row.tokens,
              row.steps, row.codec, row.frames, row.size_bytes, row.digest.hex(), json.dumps(row.norms_sq))  # fmt: skip
    marks = ",".join("?" * (len(values) + 1))
    db.execute(
        f"INSERT INTO contributions VALUES ({marks},'pending',NULL,NULL,NULL,NULL,NULL)",  # noqa: S608 - marks only
        (*values, _checksum(values)),
    )


def put_fates(db: sqlite3.Connection, generation: int, fates: Sequence[FateRow]) -> None:
    """Ends pending contributions. They must be pending: a receipt is given once."""
    for row in fates:
        _put_fate(db, generation, row)


def _put_fate(db: sqlite3.Connection, generation: int, row: FateRow) -> None:
    key = row.key
    done = db.execute(
        "UPDATE contributions SET fate=?, version=?, weight=?, staleness=?, reason=?, dropped=? WHERE generation=? "
        "AND learner=? AND incarnation=? AND fragment=? AND seq=? AND fate='pending'",
        (row.fate, row.version, row.weight, row.staleness, row.reason, int(row.dropped),
         generation, key.learner, key.incarnation, key.fragment, key.seq),
    )  # fmt: skip
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
    return [LearnerRow(r[0], r[1], r[2], json.loads(r[3]), json.loads(r[4])) for r in _verified(rows, "learners", 5)]


def contributions(
    db: sqlite3.Connection, generation: int, condition: str = "", values: Sequence[Any] = ()
) -> Iterator[tuple[ContributionRow, FateRow]]:
    """Contributions of a generation in key order, with their fates. condition: constant SQL, such as "AND fate=?"."""
    query = f"SELECT * FROM contributions WHERE generation=? {condition} ORDER BY learner, incarnation, fragment, seq"  # noqa: S608
    for r in _verified(db.execute(query, (generation, *values)), "contributions", 14):
        key = Key(r[1], r[2], r[3], r[4])
        cycle, base_version, tokens, steps, codec, frames, size_bytes, digest, norms_sq = r[5:14]
        row = ContributionRow(
            key, cycle, base_version, tokens, steps, codec, frames, size_bytes,
            bytes.fromhex(digest), tuple(json.loads(norms_sq)),
        )  # fmt: skip
        yield row, FateRow(key, r[15], r[16] or 0, r[17] or 0.0, r[18] or 0, r[19] or "", bool(r[20]))


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
