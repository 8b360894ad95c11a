"""Lists the files that a core needs to start from a run's directory, and checks the content of each file.

A backup contains the newest snapshot, the initial parameters, and the payloads that no snapshot covers. If the run has
several shards, a backup also contains the snapshots of the newest checkpoints. A recorded run has all its payloads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from atoll_wire.errors import UserError
from atoll_wire.layout.frame_spans import Codec

from atoll_server.checkpoints.restore import INITIAL, LEDGER, READ_BYTES, Origin, check_initial
from atoll_server.checkpoints.snapshot import check_snapshot, snapshot_path
from atoll_server.ledger import database, lineage, manifests, run_ledger, shard_ledger
from atoll_server.ledger.database import LedgerError
from atoll_server.ledger.rows import ContributionRow, SnapshotRow
from atoll_server.storage.disk import Disk
from atoll_server.storage.spool import Spool

LOG = "audit.jsonl"  # name of the audit log; a number follows in the names of full files
ROWS = 1000  # number of rows read at a time
CHECKPOINTS = 2  # number of newest checkpoints of several shards in a backup; the shards' backups are not simultaneous


class BackupError(UserError):
    """A backup cannot be taken, or is incomplete or damaged. The message is one line with the fix."""


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A file whose content never changes. path: relative to the run's directory.

    identity: text from the ledger that differs if the content differs. large: whether copying takes long. check:
    function that reads the file below a given directory and raises UserError or OSError if the file is damaged.
    """

    path: str
    identity: str
    large: bool
    check: Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run's directory in a ledger.

    meta: the run's values. snapshots: the snapshots that a backup contains, oldest first. versions: version of each
    fragment in this directory. files: all files except the ledger.
    """

    meta: dict[str, Any]
    snapshots: list[SnapshotRow]
    versions: dict[int, int]
    files: list[BackupFile]


def state_of(db: sqlite3.Connection, directory: Path, disk: Disk) -> RunState:
    """Returns the state in a ledger. directory: the directory that contains the payloads of a recorded run.

    Raises BackupError if the run has no parameters yet, and LedgerError if the ledger is damaged.
    """
    meta = run_ledger.get_meta(db)
    if "fingerprint" not in meta:
        raise BackupError(f"the run in {directory} has no parameters yet: start a learner first")
    if moved := meta.get(run_ledger.MOVED):
        raise BackupError(f"the run in {directory} was moved to {moved}: back up the directories there")
    origin, snapshots = Origin.of(meta), _snapshots(db, meta)
    files = [BackupFile(INITIAL, meta["initial_sha256"], large=True, check=partial(_check_initial, meta, disk))]
    for row in snapshots:
        name = snapshot_path(Path(), row.id).as_posix()
        check = partial(_check_snapshot, origin, row, disk)
        files.append(BackupFile(name, _digest(asdict(row)), large=True, check=check))
    covered = lineage.snapshots(db, origin.line)[-1:]
    versions = {}
    for fragment in origin.fragments():
        after = covered[0].versions[fragment.index] if covered else 0
        merges = lineage.merges(db, origin.line, fragment.index, after)
        versions[fragment.index] = merges[-1][1].version if merges else after
    payloads = {each.path: each for each in _payloads(db, meta, origin, covered, directory, disk)}
    return RunState(meta, snapshots, versions, [*payloads.values(), *files])


def _snapshots(db: sqlite3.Connection, meta: dict[str, Any]) -> list[SnapshotRow]:
    """Returns the newest snapshot, if there is one, and the snapshots of the newest checkpoints of several shards."""
    newest = {row.id for row in lineage.snapshots(db, lineage.line_of(meta))[-1:]}
    named = set(sorted(manifests.kept_of(meta).snapshots)[-CHECKPOINTS:]) if "owned" in meta else set()
    return [row for row in shard_ledger.snapshots(db) if row.id in newest | named]


def _drop_other_snapshots(db: sqlite3.Connection) -> None:
    """Removes from a backup's ledger the snapshots and checkpoints that the backup does not contain."""
    meta = run_ledger.get_meta(db)
    wanted = {row.id for row in _snapshots(db, meta)}
    with database.transaction(db):
        for row in shard_ledger.snapshots(db):
            if row.id not in wanted:
                shard_ledger.drop_snapshot(db, row.id)
        if "owned" in meta:
            known, kept = manifests.manifests_of(meta), manifests.kept_of(meta)
            manifests.put_kept(db, replace(kept, snapshots=kept.snapshots & wanted))
            if known:
                manifests.put_manifests(db, [each for each in known if each.snapshots[each.own] in wanted])


def _payloads(
    db: sqlite3.Connection,
    meta: dict[str, Any],
    origin: Origin,
    covered: list[SnapshotRow],
    directory: Path,
    disk: Disk,
) -> Iterator[BackupFile]:
    """Yields the payloads that a starting core reads. For a recorded run, yields all payloads in the directory.

    covered: a list of the newest snapshot; empty if there is none.
    """
    spool, generation = Spool(directory / "spool", limit_bytes=0, kept_bytes=0, disk=disk), meta["generation"]
    for row, _ in shard_ledger.contributions(db, generation, "AND fate='pending'"):
        yield _payload(spool, generation, row, disk)
    for fragment in origin.fragments():
        after = covered[0].versions[fragment.index] if covered else 0
        for made_in, row, _ in lineage.merged(db, origin.line, fragment.index, after):
            yield _payload(spool, made_in, row, disk)
    if not meta["settings"]["record"]:
        return
    for made_in in range(1, generation + 1):
        for row, _ in shard_ledger.contributions(db, made_in, "AND fate='merged'"):
            if disk.exists(spool.path(made_in, row.key)):
                yield _payload(spool, made_in, row, disk)


def _payload(spool: Spool, generation: int, row: ContributionRow, disk: Disk) -> BackupFile:
    path = spool.path(generation, row.key).relative_to(spool.directory.parent).as_posix()
    return BackupFile(path, row.digest.hex(), large=False, check=partial(_check_payload, generation, row, disk))


def _digest(values: Any) -> str:  # noqa: ANN401 - JSON values
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------- checks


def _check_initial(meta: dict[str, Any], disk: Disk, folder: Path) -> None:
    check_initial(folder / INITIAL, meta["initial_sha256"], disk)


def _check_snapshot(origin: Origin, row: SnapshotRow, disk: Disk, folder: Path) -> None:
    check_snapshot(snapshot_path(folder, row.id), origin.fragments(), row, disk)


def _check_payload(generation: int, row: ContributionRow, disk: Disk, folder: Path) -> None:
    spool = Spool(folder / "spool", limit_bytes=0, kept_bytes=0, disk=disk)
    stored = spool.open(generation, row.key, Codec(row.codec), np.array(row.norms_sq, np.float64), row.scale)
    stored.check(row.frames, row.digest)


def check_ledger(db: sqlite3.Connection, path: Path) -> None:
    """Reads every page and row of a ledger. Raises LedgerError if one is damaged."""
    try:
        database.check_pages(db, path, indices=True)
        number = shard_ledger.read_again(db, 0, ROWS)
        while number:
            number = shard_ledger.read_again(db, number, ROWS)
        shard_ledger.check_rows(db)
    except (sqlite3.Error, TypeError, ValueError) as error:  # a row with a flipped bit may raise the last two
        raise LedgerError(f"{path} is damaged ({error}): restore it from a backup") from error


def copy_ledger(source: Path, target: Path, disk: Disk) -> None:
    """Copies the state of a ledger at one moment. A core may be using the ledger. The copy needs no other files.

    The core can continue to write during the copy. Raises LedgerError if the ledger cannot be read, and OSError if the
    target's disk is full.
    """
    with database.read_ledger(source) as db, contextlib.closing(disk.connect(target)) as copied:
        try:
            db.backup(copied)
            copied.execute("PRAGMA journal_mode=DELETE")
            if "fingerprint" in run_ledger.get_meta(copied):
                _drop_other_snapshots(copied)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:  # only the copy grows, so its disk is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from error
            raise


@contextlib.contextmanager
def open_copy(folder: Path) -> Iterator[sqlite3.Connection]:
    """Context manager for a read-only connection to the ledger of a backup. Raises LedgerError."""
    with database.read_ledger(folder / LEDGER, unused=True) as db:
        yield db


def sha256(path: Path, disk: Disk) -> str:
    """Returns the digest of a file in hex. Raises OSError if the file cannot be read."""
    digest, offset = hashlib.sha256(), 0
    with contextlib.closing(disk.open(path)) as file:
        while offset < file.size:
            digest.update(file.read_at(offset, READ_BYTES))
            offset += READ_BYTES
    return digest.hexdigest()
