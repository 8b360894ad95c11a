"""Opens the ledger's SQLite database, checks its schema and its pages, and recognises a full disk.

The ledger uses a write-ahead log with synchronous=FULL, so that a transaction is on the disk when its commit returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll_wire.errors import UserError

from atoll_server.storage.disk import DISK, Disk

SCHEMA_VERSION = 7
CHECKED_AT_ONCE_BYTES = 32 << 20  # the pages of a larger ledger are checked after the core's start, not during it

RUN_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE learners (
    name TEXT PRIMARY KEY, region TEXT NOT NULL, incarnation INTEGER NOT NULL, nonces TEXT NOT NULL,
    account TEXT NOT NULL, evicted TEXT NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE datasets (
    id INTEGER PRIMARY KEY, declared TEXT NOT NULL, account TEXT NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE leases (
    id INTEGER PRIMARY KEY, dataset INTEGER NOT NULL, learner TEXT NOT NULL, incarnation INTEGER NOT NULL,
    handed INTEGER NOT NULL, ended TEXT NOT NULL, checksum INTEGER NOT NULL) STRICT;
CREATE TABLE leased_units (
    lease INTEGER NOT NULL, ordinal INTEGER NOT NULL, position INTEGER NOT NULL, outcome TEXT NOT NULL,
    merged INTEGER NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (lease, ordinal)) STRICT;
"""
SHARD_TABLES = """
CREATE TABLE contributions (
    generation INTEGER NOT NULL, learner TEXT NOT NULL, incarnation INTEGER NOT NULL, fragment INTEGER NOT NULL,
    seq INTEGER NOT NULL, cycle INTEGER NOT NULL, base_version INTEGER NOT NULL, tokens INTEGER NOT NULL,
    steps INTEGER NOT NULL, codec INTEGER NOT NULL, frames INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    digest TEXT NOT NULL, norms_sq TEXT NOT NULL, scale REAL NOT NULL, accepted_at REAL NOT NULL,
    units TEXT NOT NULL, checksum INTEGER NOT NULL, fate TEXT NOT NULL, version INTEGER NOT NULL, weight REAL NOT NULL,
    staleness REAL NOT NULL, reason TEXT NOT NULL, dropped INTEGER NOT NULL, fate_checksum INTEGER NOT NULL,
    PRIMARY KEY (generation, learner, incarnation, fragment, seq)) STRICT;
CREATE INDEX contributions_by_version ON contributions (generation, fragment, version);
CREATE INDEX contributions_by_learner ON contributions (learner);
CREATE INDEX contributions_pending ON contributions (generation) WHERE fate='pending';
CREATE INDEX contributions_refused ON contributions (generation) WHERE fate='refused';
CREATE TABLE tallies (
    generation INTEGER NOT NULL, learner TEXT NOT NULL, incarnation INTEGER NOT NULL, fragment INTEGER NOT NULL,
    through INTEGER NOT NULL, merged INTEGER NOT NULL, refused INTEGER NOT NULL, tokens TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, seq INTEGER NOT NULL, cycle INTEGER NOT NULL, units TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (generation, learner, incarnation, fragment)) STRICT;
CREATE TABLE merges (
    generation INTEGER NOT NULL, fragment INTEGER NOT NULL, version INTEGER NOT NULL, cycle INTEGER NOT NULL,
    shares TEXT NOT NULL, rule TEXT NOT NULL, run_tokens INTEGER NOT NULL, voided_tokens INTEGER NOT NULL,
    theta INTEGER NOT NULL, theta_pub INTEGER NOT NULL, momentum INTEGER NOT NULL, update_bytes INTEGER NOT NULL,
    merged_at REAL NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (generation, fragment, version)) STRICT;
CREATE TABLE snapshots (
    id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, versions TEXT NOT NULL, checksums TEXT NOT NULL,
    tokens TEXT NOT NULL, taken_at REAL NOT NULL, size_bytes INTEGER NOT NULL,
    datasets TEXT NOT NULL, checksum INTEGER NOT NULL) STRICT;
"""


# Appended to "...: restore a backup" in a running core, whose memory still contains the undamaged model.
BEFORE_RESTORING = ", but first export the model and check the disk"


class LedgerError(UserError):
    """The ledger is damaged or locked, or uses a different schema version. The message is one line with the fix."""


def open_ledger(path: Path, disk: Disk = DISK, tables: str = RUN_TABLES + SHARD_TABLES) -> sqlite3.Connection:
    """Opens the ledger or creates it with these tables. Raises LedgerError if it is damaged or uses another schema.

    Raises sqlite3.OperationalError if the disk is full (see `no_room`).
    """
    db = disk.connect(path)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        if not _schema(db):
            db.executescript(f"BEGIN; {tables} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        _check_schema(db, path)
        # After a failed fsync, the write-ahead log may be only in the page cache. This checkpoint writes its changes.
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
        if not large(db):
            check_pages(db, path)
    except BaseException as error:
        db.close()
        if not isinstance(error, sqlite3.DatabaseError) or no_room(error):
            raise
        raise _unusable(path, error) from error
    return db


@contextlib.contextmanager
def read_ledger(path: Path, *, unused: bool = False) -> Iterator[sqlite3.Connection]:
    """Context manager for a read-only connection to an existing ledger, which a core may be using. Raises LedgerError.

    This also works on a read-only disk if the core ended cleanly or the directory is a complete copy. unused: whether
    no core is using the ledger; SQLite then needs no files next to it.
    """
    unused = unused or not os.access(path.parent, os.W_OK)
    still = unused and not path.with_name(f"{path.name}-wal").exists()
    try:
        address = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if still else ''}"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as db:
            if not _schema(db):
                raise LedgerError(f"{path} cannot be used as a ledger (it is empty): restore it from a backup")
            _check_schema(db, path)
            yield db
    except sqlite3.Error as error:
        raise _unusable(path, error) from error


def _schema(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _check_schema(db: sqlite3.Connection, path: Path) -> None:
    if (found := _schema(db)) != SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has schema {found}, but this version reads {SCHEMA_VERSION}: use the version that wrote it"
        )


def _unusable(path: Path, error: sqlite3.Error) -> LedgerError:
    outside = isinstance(error, sqlite3.OperationalError)
    fix = "check the disk and the file's permissions" if outside else "restore it from a backup"
    return LedgerError(f"{path} cannot be used as a ledger ({error}): {fix}")


def no_room(error: sqlite3.Error) -> bool:
    """Returns whether a full disk caused the error."""
    return getattr(error, "sqlite_errorcode", None) in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager for a transaction. It is durable when the block ends and is rolled back if the block raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def large(db: sqlite3.Connection) -> bool:
    """Returns whether the ledger is too large to check every page when a core starts (see CHECKED_AT_ONCE_BYTES)."""
    pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return bool(pages * size > CHECKED_AT_ONCE_BYTES)


def check_pages(db: sqlite3.Connection, path: Path, *, indices: bool = False) -> None:
    """Checks every page. Raises LedgerError if one is damaged. indices: whether to also check the indices."""
    broken = db.execute(f"PRAGMA {'integrity' if indices else 'quick'}_check(1)").fetchone()[0]
    if broken != "ok":
        raise LedgerError(f"{path} is damaged ({' '.join(broken.split())}): restore the directory from a backup")


def checksum(values: Sequence[Any]) -> int:
    """Returns the CRC-32 of a row's values."""
    return zlib.crc32(json.dumps(values).encode())


def verified(rows: Iterator[Any], table: str, columns: int, named_by: int = 5) -> Iterator[Any]:
    """Yields the rows after checking each row's checksum. Raises LedgerError if a checksum does not match.

    columns: number of columns that the checksum covers; the next column contains the checksum. named_by: number of
    leading columns that the error message shows; none of them may contain a secret.
    """
    for row in rows:
        if checksum(row[:columns]) != row[columns]:
            text = f"a row of the ledger table {table} does not match its checksum"
            raise LedgerError(f"{text} ({row[:named_by]}): restore a backup")
        yield row
