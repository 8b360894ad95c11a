"""The folder that contains the backups of one run's directory. Each backup is a folder named after its time.

A backup is complete once its folder has its final name. Folders whose name also has `.part` are left over from an
interrupted backup or removal, and the next backup removes them. Files and folders with other names are never touched.
Backups share unchanged files by hard links.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll_wire.errors import SettingsError

from atoll_server.backups.backup_files import LOG, BackupError
from atoll_server.checkpoints.restore import INITIAL, LEDGER
from atoll_server.storage import crash_points
from atoll_server.storage.disk import Disk

RECORD, PART, LOCK = "backup.json", ".part", "lock"
FORMAT = 1  # version number of the format of RECORD
NAME = re.compile(r"\d{8}T\d{6}\.\d{3}Z")  # name of a backup's folder
STORED = re.compile(rf"{INITIAL}|{LEDGER}|{LOG}(\.\d+)?|(snapshots|spool)(/[A-Za-z0-9._-]+)+")  # files in a backup


@dataclass(frozen=True, slots=True)
class BackupRecord:
    """What a backup contains, as stored in RECORD.

    shard, shards: number of the directory's shard, and number of shards. taken_at: time of the ledger's copy, in
    wall-clock seconds. versions: version of each fragment in the directory. snapshots: numbers of the directory's
    snapshots. checkpoints: in the registrar's directory of a run with several shards, each checkpoint's number with the
    number of each shard's snapshot. files: each file's size in bytes and its identity (see `BackupFile`), keyed by
    path.
    """

    format: int
    run: str
    generation: int
    epoch: int
    shard: int
    shards: int
    taken_at: float
    versions: dict[int, int]
    snapshots: list[int]
    checkpoints: dict[int, dict[int, int]]
    files: dict[str, tuple[int, str]]

    def merges(self) -> int:
        return sum(self.versions.values())

    def size_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> BackupRecord:
        """Returns the record from JSON values. Raises KeyError, TypeError or ValueError if they are invalid."""
        values = {each.name: data[each.name] for each in fields(cls)}
        values["versions"] = {int(at): int(version) for at, version in values["versions"].items()}
        values["checkpoints"] = {
            int(number): {int(shard): int(snapshot) for shard, snapshot in named.items()}
            for number, named in values["checkpoints"].items()
        }
        values["files"] = {str(path): (int(size), str(identity)) for path, (size, identity) in values["files"].items()}
        for path in values["files"]:
            if not STORED.fullmatch(path) or ".." in Path(path).parts:
                raise ValueError(f"no backup contains a file {path!r}")
        return cls(**values)


def read_record(backup: Path) -> BackupRecord:
    """Returns the record of a backup. Raises BackupError if `backup` is not a backup in this version's format."""
    try:
        data = json.loads((backup / RECORD).read_text())
        if data["format"] == FORMAT:
            if data.pop("sha256") != _digest(data):
                raise ValueError("it does not match its checksum")
            return BackupRecord.from_data(data)
    except OSError as error:
        text = (
            f"{backup} is not a backup ({RECORD}: {error.strerror}): give a folder that `atoll checkpoint backup` wrote"
        )
        raise BackupError(text) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BackupError(f"{backup / RECORD} is damaged ({error}): use another backup") from error
    raise BackupError(f"{backup} has format {data['format']}, but this version reads {FORMAT}: use a newer Atoll")


def write_record(backup: Path, record: BackupRecord, disk: Disk) -> None:
    """Writes a backup's record and makes it durable."""
    data = json.loads(json.dumps(record.as_data()))  # with the same types as after reading the file
    with contextlib.closing(disk.create(backup / RECORD)) as file:
        file.write(json.dumps(data | {"sha256": _digest(data)}, indent=1).encode() + b"\n")
        file.sync()


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def backup_name(at: float) -> str:
    """Returns the name of a backup's folder. Names sort by time. at: wall-clock seconds."""
    when = datetime.fromtimestamp(at, UTC)
    return f"{when:%Y%m%dT%H%M%S}.{when.microsecond // 1000:03d}Z"


def backups_in(root: Path) -> list[Path]:
    """Returns the complete backups in a folder, oldest first."""
    return sorted(path.parent for path in root.glob(f"*/{RECORD}") if NAME.fullmatch(path.parent.name))


def newest_in(root: Path) -> tuple[Path, BackupRecord] | None:
    """Returns the newest complete backup in a folder, if there is one. Raises BackupError if its record is damaged."""
    known = backups_in(root)
    if not known:
        return None
    try:
        return known[-1], read_record(known[-1])
    except BackupError as error:
        fact = str(error).rpartition(": ")[0]
        raise BackupError(f"{fact}: move {known[-1]} to another folder, then take a new backup") from error


@contextlib.contextmanager
def only_backup(root: Path, disk: Disk) -> Iterator[None]:
    """Context manager that prevents other backups to this folder. Raises SettingsError if one is running."""
    unlock: Callable[[], None]
    try:
        disk.make_directory(root)
        disk.sync_directory(root.parent)
        unlock = disk.lock(root / LOCK)
    except BlockingIOError as error:
        raise SettingsError(f"another backup writes to {root}: wait for it, or give another folder") from error
    except OSError as error:
        raise SettingsError(f"{root} cannot be used ({error.strerror}): give a folder that you may write to") from error
    try:
        yield
    finally:
        unlock()


def remove_interrupted(root: Path) -> None:
    """Removes the files and folders that an interrupted backup or removal left behind."""
    for path in sorted(root.glob(f"*{PART}")):
        if NAME.fullmatch(path.stem):
            _remove(path)


def remove_old(root: Path, keep: int, disk: Disk) -> int:
    """Removes all but the newest `keep` backups. Returns how many it removed."""
    old = backups_in(root)[:-keep]
    for path in old:
        part = path.with_name(path.name + PART)
        disk.rename(path, part)
        disk.sync_directory(root)
        crash_points.point("backup.old forgotten")
        _remove(part)
        crash_points.point("backup.old removed")
    return len(old)


def _remove(path: Path) -> None:
    """Removes a folder. If `path` is a symbolic link to a folder, removes only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
