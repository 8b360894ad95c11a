"""Checks whether a core can start from a run's directory. The check needs no running core and changes no files."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from atoll_wire.cli.output import Format, show_lines
from atoll_wire.errors import SettingsError, UserError
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.tensor_header import TensorFileError

from atoll_server.backups.backup import check_files
from atoll_server.backups.backup_folder import RECORD, read_record
from atoll_server.checkpoints.restore import INITIAL, LEDGER, RESTORING, Origin, check_initial
from atoll_server.checkpoints.snapshot import SnapshotError, load_snapshot, snapshot_path
from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_server.checkpoints.verification import DAMAGE, ROWS
from atoll_server.cli.run_directory import ledger_of
from atoll_server.ledger import database, run_ledger, shard_ledger
from atoll_server.ledger.database import LedgerError
from atoll_server.processes.trial_start import TrialStart, trial_start
from atoll_server.storage.disk import DISK
from atoll_server.storage.spool import Spool, SpoolError


class _Report:
    """Prints each part as soon as it is checked, or all parts as JSON at the end."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._parts: list[dict[str, Any]] = []
        self._warnings: list[str] = []

    def part(self, name: str, text: str, *, intact: bool = True, **figures: int) -> None:
        """Reports a checked part. text: its figures for people. figures: for programs."""
        state = "ok" if intact else "damaged"
        self._parts.append({"part": name, "state": state, **figures})
        self._print(f"{name}: {state} ({text})" if text else f"{name}: {state}")

    def warn(self, text: str) -> None:
        """Reports damage that does not prevent a start."""
        self._warnings.append(text)
        self._print(f"warning: {text}")

    def end(self, directory: Path) -> None:
        """Reports that a core can start from the directory."""
        survived = f" (warnings: {len(self._warnings)})" if self._warnings else ""
        found = {"directory": str(directory), "parts": self._parts, "warnings": self._warnings}
        show_lines(found, self._form, [f"a core can start from {directory}{survived}"])

    def _print(self, line: str) -> None:
        if not self._form.is_json:
            print(line)


def verify(directory: Path, form: Format = Format.TABLE) -> None:
    """Prints one line per part of a backup or directory. Prints a warning for damage that does not prevent a start.

    In JSON, prints one object if a core can start.
    Raises UserError for damage that would prevent a start or stop the core at a merge. Also raises UserError for any
    damaged page of the ledger, even if a starting core does not read this page.
    """
    report = _Report(form)
    if DISK.exists(directory / RESTORING):
        raise SettingsError(f"{directory} is incomplete (a restore of a backup was interrupted): run the restore again")
    if DISK.exists(directory / RECORD):
        record = read_record(directory)
        check_files(directory, record)
        text = f"{len(record.files)} files, {record.size_bytes() / 1e6:.1f} MB"
        report.part("backup files", text, files=len(record.files), size_bytes=record.size_bytes())
    with _unused(directory):
        try:
            with ledger_of(directory, unused=True) as db:
                _Check(db, directory, report).all()
        except DAMAGE as error:  # a corrupt row may also raise Python errors
            if isinstance(error, UserError):
                raise
            raise LedgerError(f"{directory} is damaged ({error}): restore it from a backup") from error


@contextlib.contextmanager
def _unused(directory: Path) -> Iterator[None]:
    """Context manager that prevents any core from using the directory. Raises SettingsError if a core uses it."""
    try:
        unlock = DISK.share(directory / "lock")
    except BlockingIOError as error:
        raise SettingsError(f"a core uses {directory}: stop the core, or check a copy of the directory") from error
    except (FileNotFoundError, NotADirectoryError):
        yield  # no core has used the directory
        return
    except OSError as error:
        raise SettingsError(
            f"{directory} cannot be read ({error.strerror}): run the command as a user who may read its files"
        ) from error
    try:
        yield
    finally:
        unlock()


class _Check:
    """Checks one directory, in the same order as a starting core."""

    def __init__(self, db: sqlite3.Connection, directory: Path, report: _Report) -> None:
        self._db = db
        self._directory = directory
        self._ledger = directory / LEDGER
        self._report = report

    def all(self) -> None:
        database.check_pages(self._db, self._ledger)
        size = self._ledger.stat().st_size
        self._report.part("ledger pages", f"{size / 1e6:.1f} MB", size_bytes=size)
        self._initial_parameters()
        self._snapshots()
        start = trial_start(self._db, self._directory)
        merges = sum(map(len, start.restored.updates.values()))
        text = f"{merges} merges repeated, {len(start.pending)} contributions wait for a merge"
        self._report.part("start", text, merges=merges, pending=len(start.pending))
        self._payloads(start)
        self._rows()
        self._report.end(self._directory)

    def _initial_parameters(self) -> None:
        """Checks the digest of the file. A core that can start from a snapshot reads only the file's header."""
        meta = run_ledger.get_meta(self._db)
        size = open_tensors(self._directory / INITIAL).data.size
        try:
            check_initial(self._directory / INITIAL, meta["initial_sha256"], DISK)
            self._report.part("initial parameters", f"{size / 1e6:.1f} MB", size_bytes=size)
        except (TensorFileError, OSError) as error:
            self._report.warn(f"initial parameters: {error}")

    def _snapshots(self) -> None:
        fragments = Origin.of(run_ledger.get_meta(self._db)).fragments()
        rows = shard_ledger.snapshots(self._db)
        intact = 0
        for row in rows:
            try:
                load_snapshot(snapshot_path(self._directory, row.id), fragments, row)
                intact += 1
            except SnapshotError as error:
                self._report.warn(
                    f"snapshot {row.id} is damaged ({error}), so no restore can use it: keep an intact backup"
                )
        self._count("snapshots", intact, len(rows))

    def _count(self, name: str, intact: int, total: int) -> None:
        text = f"{intact} of {total} intact"
        self._report.part(name, text, intact=intact == total, intact_files=intact, files=total)

    def _payloads(self, start: TrialStart) -> None:
        """Reads each frame of the payloads.

        The trial start has already read the payloads of the merges that it replayed.
        """
        for held in start.pending:
            held.stored.check(held.row.frames, held.row.digest)  # a core would stop when it merges a damaged payload
        spool = Spool(self._directory / "spool", limit_bytes=0, kept_bytes=0)
        read, damaged = len(start.pending), 0
        for generation, row in start.kept:
            if not DISK.exists(spool.path(generation, row.key)):
                continue
            read += 1
            try:
                norms_sq = np.array(row.norms_sq, np.float64)
                stored = spool.open(generation, row.key, Codec(row.codec), norms_sq, row.scale)
                stored.check(row.frames, row.digest)
            except (SpoolError, OSError) as error:
                damaged += 1
                self._report.warn(f"{error} (only a start from an older checkpoint needs this payload)")
        self._count("payloads", read - damaged, read)

    def _rows(self) -> None:
        """Reads the rows and indices that a starting core does not read."""
        try:
            number = shard_ledger.read_again(self._db, 0, ROWS)
            while number:
                number = shard_ledger.read_again(self._db, number, ROWS)
            shard_ledger.check_rows(self._db)
            database.check_pages(self._db, self._ledger, indices=True)
            self._report.part("ledger rows", "")
        except DAMAGE as error:
            text = str(error) if isinstance(error, UserError) else f"{self._ledger} is damaged ({error})"
            self._report.warn(f"ledger rows: {text}")
