"""Restores a backup into a new directory, from which a core starts a new generation of the run.

A mark in the directory stops cores until the restore is complete. After an interruption, the next call starts over.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll_wire.errors import SettingsError
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.backups.backup import check_files
from atoll_server.backups.backup_files import LOG, BackupError
from atoll_server.backups.backup_folder import BackupRecord, read_record
from atoll_server.checkpoints.restore import INITIAL, LEDGER, READ_BYTES, RESTORING, Origin, restore
from atoll_server.checkpoints.rollback import RolledBack, roll_back
from atoll_server.checkpoints.snapshot import SnapshotWriter, snapshot_path
from atoll_server.learners.goodput import TimeAccount
from atoll_server.ledger import data_ledger, database, lineage, manifests, run_ledger, shard_ledger
from atoll_server.ledger.rows import SnapshotRow
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk

MOUNTED = "lost+found"  # a new volume may contain this folder
WITHOUT_RUN = re.compile(rf"({LEDGER}|{INITIAL}|{LOG}).*|spool|staging|snapshots")  # files of a core without parameters


@dataclass(frozen=True, slots=True)
class RestoredBackup:
    """A restored directory. rolled_back: the new generation; None for a shard that follows its registrar."""

    record: BackupRecord
    rolled_back: RolledBack | None


def restore_backup(
    backup: Path, directory: Path, checkpoint: int = 0, disk: Disk = DISK, clock: Clock = SYSTEM
) -> RestoredBackup:
    """Restores a backup into a directory that does not contain a run with parameters. The backup is not changed.

    The parameters are those of the backup, bit for bit, and a new generation begins from them. A run with several
    shards continues from a checkpoint that the registrar's backup names. checkpoint: its number; 0 for the newest. The
    directory of another shard is only restored: it rolls back to the checkpoint when it attaches to the registrar.

    Needs as much memory as a core. Raises SettingsError if the directory cannot be used, BackupError for a damaged
    backup, and another UserError if the backup's merges cannot be repeated. After an error, no core starts from the
    directory.

    Example: `restore_backup(Path("/mnt/backups/20261126T120000.000Z"), Path("run"))`
    """
    record = read_record(backup)
    if directory.resolve().is_relative_to(backup.resolve()):
        raise SettingsError(f"{directory} is inside the backup, which must not change: give a --dir outside it")
    with _claimed(directory, disk):
        try:
            _copy(backup, directory, record, disk)
            check_files(directory, record, disk)
            crash_points.point("restoring.copied")
            with contextlib.closing(database.open_ledger(directory / LEDGER, disk)) as db:
                meta = run_ledger.get_meta(db)
                wanted = _checkpoint(db, meta, directory, checkpoint, disk, clock)
        except OSError as error:
            raise BackupError(
                f"{backup} cannot be restored to {directory} ({error}): check both disks and the free space"
            ) from error
    crash_points.point("restoring.snapshot written")
    rolled_back = roll_back(directory, wanted, disk, clock, backup_at=record.taken_at) if wanted else None
    crash_points.point("restoring.rolled back")
    disk.remove(directory / RESTORING)
    disk.sync_directory(directory)
    crash_points.point("restoring.finished")
    return RestoredBackup(record, rolled_back)


@contextlib.contextmanager
def _claimed(directory: Path, disk: Disk) -> Iterator[None]:
    """Context manager that locks an empty directory and marks it as incomplete. The mark stays. Raises SettingsError.

    Removes the files of an interrupted restore, or of a core whose run has no parameters.
    """
    try:
        disk.make_directory(directory)
        unlock = disk.lock(directory / "lock")
    except BlockingIOError as error:
        raise SettingsError(f"a core uses {directory}: stop the core, or give another --dir") from error
    except OSError as error:
        raise SettingsError(
            f"{directory} cannot be used ({error.strerror}): give a directory that you may write to"
        ) from error
    try:
        names = {path.name for path in directory.iterdir()} - {"lock", MOUNTED}
        if RESTORING not in names and not _has_no_run(directory, names):
            raise SettingsError(f"{directory} is not empty: give a new --dir, or move its files away")
        disk.create(directory / RESTORING).close()
        disk.sync_directory(directory)
        disk.sync_directory(directory.parent)
        for name in names - {RESTORING}:
            path = directory / name
            shutil.rmtree(path) if path.is_dir() else disk.remove(path)
        crash_points.point("restoring.begun")
        yield
    finally:
        unlock()


def _has_no_run(directory: Path, names: set[str]) -> bool:
    """Returns whether the directory is empty, or a core has started there but its run has no parameters yet."""
    if not names:
        return True
    if LEDGER not in names or not all(WITHOUT_RUN.fullmatch(name) for name in names):
        return False
    with database.read_ledger(directory / LEDGER) as db:
        return "fingerprint" not in run_ledger.get_meta(db)


def _copy(backup: Path, directory: Path, record: BackupRecord, disk: Disk) -> None:
    """Copies all files. The copies share no data with the backup, because a core writes to them."""
    for path in record.files:
        disk.make_directory((directory / path).parent)
        with contextlib.ExitStack() as stack:
            try:
                source = stack.enter_context(contextlib.closing(disk.open(backup / path)))
            except OSError as error:
                raise BackupError(f"{backup / path} cannot be read ({error.strerror}): use another backup") from error
            target = stack.enter_context(contextlib.closing(disk.create(directory / path)))
            for offset in range(0, source.size, READ_BYTES):
                target.write(source.read_at(offset, READ_BYTES))
            target.sync()
    for folder in directory.rglob("*"):
        if folder.is_dir():
            disk.sync_directory(folder)
    disk.sync_directory(directory)


def _checkpoint(
    db: sqlite3.Connection,
    meta: dict[str, Any],
    directory: Path,
    checkpoint: int,
    disk: Disk,
    clock: Clock,
) -> int:
    """Returns the number of the checkpoint from which the run continues; 0 for a shard that follows its registrar."""
    if "shard" in meta:
        if checkpoint:
            raise SettingsError("--checkpoint is for the registrar's backup: leave it out for the other shards")
        return 0
    if "owned" in meta:
        known = [each.id for each in manifests.manifests_of(meta)]
        if not known:
            raise BackupError("the backup names no checkpoint of the run: use a later backup of the registrar")
        if checkpoint and checkpoint not in known:
            raise SettingsError(f"--checkpoint {checkpoint} is not in the backup: use one of {known}")
        return checkpoint or known[-1]
    if checkpoint:
        raise SettingsError("--checkpoint is for runs with several shards: omit it, then use atoll checkpoint restore")
    return _write_snapshot(db, meta, directory, disk, clock)


def _write_snapshot(db: sqlite3.Connection, meta: dict[str, Any], directory: Path, disk: Disk, clock: Clock) -> int:
    """Repeats the merges after the backup's snapshot and writes a snapshot of the result. Returns its number."""
    restored = restore(db, Origin.of(meta), directory, disk, clock)
    begun = [each.checkpoint for each in lineage.line_of(meta).beginnings]
    number = 1 + max((*(row.id for row in shard_ledger.snapshots(db)), *begun), default=0)
    fragments = restored.layout.fragments
    writer = SnapshotWriter(snapshot_path(directory, number), fragments, disk)
    writer.begin()
    for fragment in fragments:
        writer.add(fragment.index, restored.states.pop(fragment.index))
    writer.finish()
    lengths = {each.index: each.length for each in fragments}
    accounts = {row.name: TimeAccount.from_data(row.account) for row in run_ledger.learners(db)}
    row = SnapshotRow(
        number,
        meta["generation"],
        writer.versions,
        writer.checksums,
        {name: account.counted_tokens() for name, account in accounts.items()},
        clock.wall(),
        writer.size_bytes,
        data_ledger.of_stopped_run(db, lengths),
    )
    with database.transaction(db):
        shard_ledger.add_snapshot(db, row)
    return number
