"""Takes and verifies backups of a run's directory. The core may be running and is not affected.

A backup copies the ledger as it was at one moment, and then the files that this ledger names. If the core has deleted
one of these files meanwhile, a newer snapshot covers it, so the backup starts over with a newer ledger.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

from atoll_wire.errors import SettingsError, UserError
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.backups.backup_files import (
    LOG,
    BackupError,
    BackupFile,
    RunState,
    check_ledger,
    copy_ledger,
    open_copy,
    sha256,
    state_of,
)
from atoll_server.backups.backup_folder import (
    FORMAT,
    PART,
    BackupRecord,
    backup_name,
    newest_in,
    only_backup,
    remove_interrupted,
    remove_old,
    write_record,
)
from atoll_server.checkpoints.restore import LEDGER, READ_BYTES
from atoll_server.ledger import database, manifests, run_ledger
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk, ReadableFile

ATTEMPTS = 10  # limit on the copies of the ledger for one backup
LOGS = f"{LOG}*"  # the audit log, whose files can change until they are full


@dataclass(frozen=True, slots=True)
class TakenBackup:
    """A new, verified backup. path: the backup's folder. removed: number of old backups that were removed.

    copied_bytes: size of the new data. linked_bytes: size of the data shared with the previous backup. took_s: duration
    in seconds.
    """

    path: Path
    record: BackupRecord
    copied_bytes: int
    linked_bytes: int
    removed: int
    took_s: float


class _Deleted(Exception):  # noqa: N818 - a state, after which the backup starts over
    """The core has deleted a file that the copied ledger names."""


def back_up(run: Path, root: Path, keep: int, disk: Disk = DISK, clock: Clock = SYSTEM) -> TakenBackup:
    """Backs up a run's directory into a new folder in `root` and removes all but the newest `keep` backups.

    run: the directory of a core, which may be running. The backup changes nothing in this directory and needs memory
    for one fragment. Raises SettingsError if the folders cannot be used, BackupError if the run cannot be backed up
    now, and another UserError if a file of the run is damaged. After an error, `root` contains no new backup unless the
    message says so.

    Example: `back_up(Path("run"), Path("/mnt/backups"), keep=24)`
    """
    if not disk.exists(run / LEDGER):
        raise SettingsError(f"{run} holds no run: give the --dir of a core")
    if root.resolve().is_relative_to(run.resolve()):
        raise SettingsError(f"{root} is in the run's own directory: give a folder on another disk")
    began = clock.monotonic()
    with only_backup(root, disk):
        try:
            remove_interrupted(root)
            copied = _Copy(run, root, disk, clock)
            try:
                path, record = copied.all()
            except BaseException:
                shutil.rmtree(copied.part, ignore_errors=True)
                raise
        except OSError as error:
            fix = "free space there, or keep fewer backups" if error.errno == errno.ENOSPC else "check the disk"
            raise BackupError(f"the backup of {run} to {root} failed ({error}): {fix}") from error
        try:
            removed = remove_old(root, keep, disk)
        except OSError as error:
            raise BackupError(
                f"{path} is complete, but an old backup could not be removed ({error}): check the disk"
            ) from error
    return TakenBackup(path, record, copied.copied_bytes, copied.linked_bytes, removed, clock.monotonic() - began)


def has_run(run: Path, disk: Disk = DISK) -> bool:
    """Returns whether a directory holds a run with parameters. Raises LedgerError if its ledger cannot be read."""
    if not disk.exists(run / LEDGER):
        return False
    with database.read_ledger(run / LEDGER) as db:
        return "fingerprint" in run_ledger.get_meta(db)


class _Copy:
    """A backup that is being written. part: its folder until it is complete."""

    def __init__(self, run: Path, root: Path, disk: Disk, clock: Clock) -> None:
        self.copied_bytes = self.linked_bytes = 0
        self._run = run
        self._disk = disk
        self._clock = clock
        newest = newest_in(root)
        self._earlier = newest[0] if newest else None
        self._shared = newest[1] if newest else None
        self._taken_at = clock.wall()
        self._path = root / backup_name(self._taken_at)
        self.part = root / f"{self._path.name}{PART}"
        self._written: dict[str, tuple[int, str]] = {}

    def all(self) -> tuple[Path, BackupRecord]:
        """Writes, verifies and names the backup. Returns its folder and its record."""
        if self._disk.exists(self._path) or (self._earlier is not None and self._path <= self._earlier):
            raise BackupError(f"the system clock is not later than the time of backup {self._earlier}: check NTP")
        self._disk.make_directory(self.part)
        crash_points.point("backup.begun")
        record = self._files()
        for path in sorted(self.part.rglob("*"), reverse=True):
            if path.is_dir():
                self._disk.sync_directory(path)
        crash_points.point("backup.verified")
        write_record(self.part, record, self._disk)
        self._disk.sync_directory(self.part)
        crash_points.point("backup.recorded")
        self._disk.rename(self.part, self._path)
        self._disk.sync_directory(self._path.parent)
        crash_points.point("backup.renamed")
        return self._path, record

    def _files(self) -> BackupRecord:
        """Copies the ledger and the files that it names. Repeats this until no file was deleted during the copy."""
        for _ in range(ATTEMPTS):
            self._taken_at = self._clock.wall()
            copy_ledger(self._run / LEDGER, self._fresh(LEDGER), self._disk)
            crash_points.point("backup.ledger copied")
            with open_copy(self.part) as db:
                check_ledger(db, self.part / LEDGER)
                state = state_of(db, self._run, self._disk)
            self._check_run(state)
            try:
                self._copy(state.files)
            except _Deleted:
                continue
            self._drop_others({each.path for each in state.files})
            return self._record(state)
        raise BackupError(
            f"the core deleted files {ATTEMPTS} times before they were copied: use a faster disk for the backup, or "
            "a larger --snapshot-every-s"
        )

    def _check_run(self, state: RunState) -> None:
        """Raises BackupError if the folder contains backups of another run or shard."""
        shared, meta = self._shared, state.meta
        if shared is not None and (shared.run, shared.shard) != (meta["run"], _shard(meta)[0]):
            raise BackupError(
                f"{self._path.parent} has backups of run {shared.run}, shard {shared.shard}, but {self._run} holds run "
                f"{meta['run']}, shard {_shard(meta)[0]}: back up each run directory to its own folder"
            )

    def _copy(self, files: list[BackupFile]) -> None:
        """Links or copies each file and verifies the copies. Raises _Deleted if the core has deleted a file.

        Opens all large files first: an open file can be read to its end even if the core deletes it meanwhile.
        """
        missing = [each for each in files if self._written.get(each.path, (0, ""))[1] != each.identity]
        missing = [each for each in missing if not self._link(each)]
        with contextlib.ExitStack() as stack:
            opened = {each.path: self._open(each.path, stack) for each in missing if each.large}
            for each in missing:
                with contextlib.ExitStack() as small:
                    source = opened[each.path] if each.large else self._open(each.path, small)
                    size = self._write(each.path, source)
                self._check(each, self._run / each.path)
                self._written[each.path] = (size, each.identity)
                crash_points.point("backup.file written")

    def _check(self, each: BackupFile, source: Path) -> None:
        """Reads a new copy back from the disk. source: the file that was copied. Raises BackupError."""
        self._disk.forget(self.part / each.path)
        try:
            each.check(self.part)
        except UserError as error:
            raise BackupError(
                f"{source} is damaged, or its copy is ({error}): check both disks, and run `atoll checkpoint take` "
                "before the next backup"
            ) from error

    def _open(self, path: str, stack: contextlib.ExitStack) -> ReadableFile:
        try:
            return stack.enter_context(contextlib.closing(self._disk.open(self._run / path)))
        except FileNotFoundError as error:
            raise _Deleted(path) from error

    def _link(self, each: BackupFile) -> bool:
        """Shares a file with the previous backup, if that backup contains the same file. Returns whether it does."""
        if self._shared is None or self._earlier is None:
            return False
        size, identity = self._shared.files.get(each.path, (0, ""))
        old = self._earlier / each.path
        if identity != each.identity or not old.is_file() or old.stat().st_size != size:
            return False
        new = self._fresh(each.path)
        self._disk.copy(old, new, link=True)
        self._written[each.path] = (size, each.identity)
        if new.samefile(old):
            self.linked_bytes += size
        else:  # the file system has no hard links
            self._check(each, old)
            self.copied_bytes += size
        crash_points.point("backup.file written")
        return True

    def _write(self, path: str, source: ReadableFile) -> int:
        """Copies a file and makes the copy durable. Returns its size in bytes."""
        offset = 0
        with contextlib.closing(self._disk.create(self._fresh(path))) as target:
            while offset < source.size:
                data = source.read_at(offset, READ_BYTES)
                if not data:
                    raise BackupError(f"{self._run / path} became shorter during the copy: check the disk")
                target.write(data)
                offset += len(data)
            target.sync()
        self.copied_bytes += offset
        return offset

    def _fresh(self, path: str) -> Path:
        """Returns the path of a file in the new backup. No file exists at this path."""
        target = self.part / path
        self._disk.make_directory(target.parent)
        self._disk.remove(target)
        return target

    def _drop_others(self, wanted: set[str]) -> None:
        """Removes the files of earlier attempts that the newest ledger no longer names."""
        for path in set(self._written) - wanted:
            self._disk.remove(self.part / path)
            del self._written[path]

    def _record(self, state: RunState) -> BackupRecord:
        """Adds the audit log and returns the record of all files."""
        files = dict(self._written)
        for log in sorted(self._run.glob(LOGS)):
            with contextlib.suppress(FileNotFoundError):  # the core has just renamed the file
                self._disk.copy(log, self._fresh(log.name), link=False)
        for path in [self.part / LEDGER, *sorted(self.part.glob(LOGS))]:
            size = path.stat().st_size
            files[path.name] = (size, sha256(path, self._disk))
            self.copied_bytes += size
        meta = state.meta
        shard, shards = _shard(meta)
        registrar = "owned" in meta and "shard" not in meta
        named = manifests.manifests_of(meta) if registrar else []
        return BackupRecord(
            format=FORMAT,
            run=meta["run"],
            generation=meta["generation"],
            epoch=meta["epoch"],
            shard=shard,
            shards=shards,
            taken_at=self._taken_at,
            versions=state.versions,
            snapshots=[row.id for row in state.snapshots],
            checkpoints={each.id: each.snapshots for each in named},
            files=files,
        )


def _shard(meta: dict[str, object]) -> tuple[int, int]:
    """Returns the number of a directory's shard and the number of shards. A registrar without fragments comes last."""
    if isinstance(given := meta.get("shard"), list):
        return int(given[0]), int(given[1])
    attached = meta.get(run_ledger.ATTACHED)
    if not isinstance(attached, dict):
        return 0, 1
    return (int(attached["count"]) if attached.get("alone") else 0), int(attached["count"])


def check_files(folder: Path, record: BackupRecord, disk: Disk = DISK) -> None:
    """Reads every file of a backup, or of a copy of a backup, and compares it with the ledger and the record.

    Needs memory for one fragment. Raises UserError if a file is missing or damaged.
    """
    for path, (size, identity) in record.files.items():
        try:
            found = (folder / path).stat().st_size
            disk.forget(folder / path)
        except OSError as error:
            raise BackupError(f"{folder / path} cannot be read ({error.strerror}): use another backup") from error
        if found != size:
            raise BackupError(f"{folder / path} has a size of {found} bytes instead of {size}: use another backup")
        if (path == LEDGER or Path(path).match(LOGS)) and sha256(folder / path, disk) != identity:
            raise BackupError(f"{folder / path} does not match its checksum: use another backup")
    with open_copy(folder) as db:
        check_ledger(db, folder / LEDGER)
        state = state_of(db, folder, disk)
    for each in state.files:
        if record.files.get(each.path, (0, ""))[1] != each.identity:
            raise BackupError(f"{folder} lacks {each.path}, which its ledger names: use another backup")
        try:
            each.check(folder)
        except UserError as error:
            raise BackupError(f"{folder / each.path} is damaged ({error}): use another backup") from error
