"""Writes and reads snapshot files, which contain the parameters, published parameters and momentum of all fragments.

Fragments are independent, so their versions in a snapshot may differ. Each fragment is written between two of its
merges. The file is durable before the snapshot's row is written to the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from atoll_wire.errors import UserError
from atoll_wire.layout.layout import FragmentLayout
from atoll_wire.layout.tensor_header import TensorFileError, write_header
from atoll_wire.model_file.tensor_values import write_data

from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_server.ledger.rows import SnapshotRow
from atoll_server.merging.merge import FragmentState
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk, WritableFile

PARTS = ("theta", "theta_pub", "momentum")


class SnapshotError(UserError):
    """A snapshot is missing or damaged. The message is one line."""


def snapshot_path(directory: Path, snapshot_id: int) -> Path:
    """Returns the path of a snapshot's file."""
    return directory / "snapshots" / f"{snapshot_id:08d}.safetensors"


class SnapshotWriter:
    """Writes one snapshot, fragment by fragment in the order of `fragments`. All methods run in a worker thread."""

    def __init__(self, path: Path, fragments: Sequence[FragmentLayout], disk: Disk = DISK) -> None:
        self.path = path
        self.size_bytes = 0
        self.versions: dict[int, int] = {}
        self.checksums: dict[int, tuple[int, int, int]] = {}
        self._fragments = fragments
        self._part = path.with_suffix(".part")
        self._disk = disk
        self._file: WritableFile | None = None

    def begin(self) -> None:
        """Creates the file and writes its header."""
        self._disk.make_directory(self.path.parent)
        self._file = self._disk.create_large(self._part)
        tensors = [(f"{part}.{f.index}", "F32", (f.length,)) for f in self._fragments for part in PARTS]
        self.size_bytes = write_header(self._file, tensors)
        crash_points.point("snapshot.begun")

    def add(self, fragment: int, state: FragmentState) -> None:
        """Appends the next fragment, whose state must not change during the call."""
        assert self._file is not None, "call begin first"
        for part in PARTS:
            write_data(self._file, getattr(state, part))
        self.versions[fragment] = state.version
        self.checksums[fragment] = state.checksums()
        crash_points.point("snapshot.fragment written")

    def finish(self) -> None:
        """Makes the file durable under its final name."""
        assert self._file is not None, "call begin first"
        self._file.sync()
        crash_points.point("snapshot.synced")
        self._file.close()
        self._disk.rename(self._part, self.path)
        crash_points.point("snapshot.renamed")
        self._disk.sync_directory(self.path.parent)
        crash_points.point("snapshot.directory synced")

    def give_up(self) -> None:
        """Removes the unfinished file after a failure."""
        if self._file is not None:
            self._file.close()
            self._disk.remove(self._part)


def load_snapshot(
    path: Path, fragments: Sequence[FragmentLayout], row: SnapshotRow, disk: Disk = DISK
) -> dict[int, FragmentState]:
    """Reads a snapshot and compares it with the checksums in the ledger. Returns the states by fragment.

    row: row of the snapshot in the ledger. Raises SnapshotError if the snapshot is missing or damaged.
    """
    return dict(_states(path, fragments, row, disk))


def check_snapshot(path: Path, fragments: Sequence[FragmentLayout], row: SnapshotRow, disk: Disk = DISK) -> None:
    """Does the same as `load_snapshot`, but keeps only one fragment at a time in memory."""
    for _ in _states(path, fragments, row, disk):
        pass


def _states(
    path: Path, fragments: Sequence[FragmentLayout], row: SnapshotRow, disk: Disk
) -> Iterator[tuple[int, FragmentState]]:
    try:
        file = open_tensors(path, disk)
        for fragment in fragments:
            arrays = [np.array(file.float32(f"{part}.{fragment.index}"), np.float32) for part in PARTS]
            state = FragmentState(row.versions[fragment.index], *arrays)
            if state.checksums() != row.checksums[fragment.index]:
                raise SnapshotError(f"{path}: fragment {fragment.index} does not match its checksums")
            file.forget()
            yield fragment.index, state
    except TensorFileError as error:
        raise SnapshotError(str(error)) from error
    except (OSError, KeyError, ValueError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error
