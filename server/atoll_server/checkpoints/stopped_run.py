"""Manages the directories of a stopped run, which are locked while it is moved, and the folder for the new ones."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll_wire.errors import SettingsError

from atoll_server.checkpoints.restore import LEDGER, Origin
from atoll_server.ledger import database, run_ledger
from atoll_server.ledger.rows import LearnerRow
from atoll_server.storage.disk import Disk

MARK = "resharded"  # an empty file that marks a folder that `reshard` wrote
BYTES_PER_PARAMETER = 12 + 4  # a snapshot, and at most a copy of the initial parameters


@dataclass(slots=True)
class StoppedShard:
    """An old directory with its open ledger. meta: the run's values in this ledger."""

    directory: Path
    db: sqlite3.Connection
    meta: dict[str, Any]

    @property
    def registrar(self) -> bool:
        return "shard" not in self.meta

    @property
    def number(self) -> int:
        """The shard's number. A registrar without fragments comes after all others."""
        if not self.registrar:
            return int(self.meta["shard"][0])
        return self.count if self.meta.get(run_ledger.ATTACHED, {}).get("alone") else 0

    @property
    def count(self) -> int:
        """The number of the run's shards that hold fragments."""
        if not self.registrar:
            return int(self.meta["shard"][1])
        return int(self.meta.get(run_ledger.ATTACHED, {}).get("count", 1))

    def fragments(self) -> list[int]:
        return [each.index for each in Origin.of(self.meta).fragments()]


@contextlib.contextmanager
def stopped_ledger(directory: Path, disk: Disk) -> Iterator[sqlite3.Connection]:
    """Context manager for a directory's ledger. No core can use the directory until the block ends.

    Raises SettingsError if there is no run or a core uses the directory, and LedgerError if the ledger is damaged.
    """
    if not disk.exists(directory / LEDGER):
        raise SettingsError(f"{directory} holds no run: give the --dir of a core")
    try:
        unlock = disk.lock(directory / "lock")
    except BlockingIOError as error:
        raise SettingsError(f"a core uses {directory}: stop the core, and run the command again") from error
    except OSError as error:
        raise SettingsError(
            f"{directory} cannot be used ({error.strerror}): give a directory that you may write to"
        ) from error
    try:
        with contextlib.closing(database.open_ledger(directory / LEDGER, disk)) as db:
            yield db
    finally:
        unlock()


def open_shards(stack: contextlib.ExitStack, directories: Sequence[Path], disk: Disk) -> list[StoppedShard]:
    """Locks the directories and opens their ledgers until the stack closes. Raises the errors of `stopped_ledger`."""
    opened = [(directory, stack.enter_context(stopped_ledger(directory, disk))) for directory in directories]
    return [StoppedShard(directory, db, run_ledger.get_meta(db)) for directory, db in opened]


def registrar_of(sources: Sequence[StoppedShard], out: Path) -> StoppedShard:
    """Returns the registrar's directory. Raises SettingsError unless these are exactly the directories of one run."""
    for source in sources:
        if "fingerprint" not in source.meta:
            raise SettingsError(
                f"the run in {source.directory} has no parameters yet: start its cores with --shard instead"
            )
        if (moved := source.meta.get(run_ledger.MOVED)) and moved != str(out.resolve()):
            raise SettingsError(f"the run in {source.directory} was moved to {moved}: give the directories there")
    registrars = [source for source in sources if source.registrar]
    if len(registrars) != 1:
        raise SettingsError(
            f"{len(registrars)} of the directories belong to a registrar: give all directories of one run"
        )
    registrar = registrars[0]
    for source in sources:
        _check_member(source, registrar)
    numbers = [source.number for source in sources]
    wanted = {registrar.number, *range(registrar.count)}
    if missing := sorted(wanted - set(numbers)):
        raise SettingsError(f"the directory of shard {missing[0]} is missing: give the directories of all shards")
    if len(numbers) > len(wanted):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise SettingsError(f"shard {twice} has two directories: give only the one that the run uses")
    return registrar


def _check_member(source: StoppedShard, registrar: StoppedShard) -> None:
    """Raises SettingsError unless a directory belongs to the registrar's run, division and generation."""
    mine, run = source.meta, registrar.meta
    if mine["run"] != run["run"]:
        raise SettingsError(
            f"{source.directory} belongs to run {mine['run']}, but {registrar.directory} to run {run['run']}: "
            "give the directories of one run"
        )
    known = run.get(run_ledger.ATTACHED, {}).get("shards", {}).get(str(source.number), ["", ""])[1]
    if source.count != registrar.count or (not source.registrar and known not in {"", mine["directory"]}):
        raise SettingsError(
            f"{source.directory} is not the run's directory for shard {source.number}: "
            f"give the directories of the run's {registrar.count} shards"
        )
    if mine["generation"] != run["generation"]:
        raise SettingsError(
            f"{source.directory} is at generation {mine['generation']}, but the run is at {run['generation']}: "
            "start all cores, so that each shard restores the same checkpoint"
        )


def learners_of(sources: Sequence[StoppedShard], registrar: StoppedShard) -> list[LearnerRow]:
    """Returns the registrar's learners with their newest incarnations, some of which only another shard may know."""
    newest: dict[str, int] = {}
    for source in sources:
        for row in run_ledger.learners(source.db):
            newest[row.name] = max(newest.get(row.name, 0), row.incarnation)
    return [
        LearnerRow(row.name, row.region, newest[row.name], row.nonces, row.account, row.evicted)
        for row in run_ledger.learners(registrar.db)
    ]


def check_room(out: Path, parameters: int, disk: Disk) -> None:
    """Raises SettingsError if the file system clearly lacks space for the new directories."""
    try:
        free = disk.free_bytes(out.absolute().parent)
    except OSError as error:
        raise SettingsError(f"{out.absolute().parent} cannot be used ({error.strerror}): give another --out") from error
    if free < (needed := BYTES_PER_PARAMETER * parameters):
        raise SettingsError(
            f"the new directories need about {needed / 1e9:.1f} GB, but {out.absolute().parent} has {free / 1e9:.1f} "
            "GB: free space, or give another --out"
        )


def new_folder(out: Path, disk: Disk) -> Path:
    """Returns an empty folder, which is renamed to its final name at the end.

    Removes the folder of an interrupted move.
    """
    if disk.exists(out):
        raise SettingsError(f"{out} exists: remove it, or give another --out")
    part = out.with_name(f"{out.name}.part")
    if disk.exists(part):
        if not disk.exists(part / MARK):
            raise SettingsError(f"{part} exists and was not written by this command: move it away")
        shutil.rmtree(part)
    disk.make_directory(part)
    disk.create(part / MARK).close()
    disk.sync_directory(part)
    disk.sync_directory(part.parent)
    return part
