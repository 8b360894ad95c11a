"""The core's access to the machine's disk. The docstrings state when written data is durable.

A core stores its run through a `Disk`. Tests replace the `Disk` with one that loses unsynced data, tears writes, fills
up or fails.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from atoll_wire.process.durable import sync_folder
from atoll_wire.process.file_lock import locked
from numpy.typing import NDArray

from atoll_server.storage.direct_file import DirectFile

# Errors if the file system has no hard links, a file has too many, or the paths are on different file systems
NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}


class WritableFile(Protocol):
    """A file open for writing. None of its data is durable before `sync`."""

    def write(self, *pieces: bytes | bytearray | memoryview) -> None:
        """Appends all pieces. Raises OSError if the write fails."""

    def sync(self) -> None:
        """Makes the data durable. The file's name is durable only after `Disk.sync_directory`."""

    def close(self) -> None:
        """Closes the file. Repeated calls are allowed."""


class ReadableFile(Protocol):
    """A file open for reading at offsets."""

    size: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Returns `length` bytes starting at `offset`, or fewer at the end of the file."""

    def forget(self) -> None:
        """Drops the durable data from the system's memory. Later reads read from the disk."""

    def close(self) -> None:
        """Closes the file. Repeated calls are allowed."""


class Disk:
    """The machine's disk. Methods may be called from any thread."""

    def make_directory(self, path: Path) -> None:
        """Creates a directory and its missing parents. They are durable after `sync_directory` of their parents."""
        path.mkdir(parents=True, exist_ok=True)

    def lock(self, path: Path) -> Callable[[], None]:
        """Takes an exclusive lock that ends with the process. Returns a function that releases the lock earlier.

        Raises BlockingIOError if another process holds the lock.
        """
        return locked(os.open(path, os.O_CREAT | os.O_RDWR, 0o640)).release

    def share(self, path: Path) -> Callable[[], None]:
        """Takes a shared lock on an existing file without writing to it. Returns a function that releases the lock.

        Raises BlockingIOError while another process holds an exclusive lock.
        """
        return locked(os.open(path, os.O_RDONLY), shared=True).release

    def create(self, path: Path) -> WritableFile:
        """Creates an empty file. Replaces an existing file."""
        return _Written(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o640))

    def create_large(self, path: Path) -> WritableFile:
        """Does the same as `create` for a file that is not read soon. Nothing may be written after `sync`."""
        return DirectFile.create(path) or self.create(path)

    def open(self, path: Path) -> ReadableFile:
        """Opens a file for reading. Raises OSError if the file cannot be opened."""
        return _Read(os.open(path, os.O_RDONLY))

    def map(self, path: Path) -> NDArray[np.uint8]:
        """Maps a file, which must not be empty. Bytes are read only when they are accessed."""
        return np.memmap(path, dtype=np.uint8, mode="r")

    def rename(self, old: Path, new: Path) -> None:
        """Renames a file atomically. Replaces an existing file."""
        old.rename(new)

    def copy(self, old: Path, new: Path, *, link: bool) -> None:
        """Copies a file and makes the copy durable.

        link: whether the files may share their data because it never changes.
        """
        try:
            if link:
                new.hardlink_to(old)
                return
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
        shutil.copyfile(old, new)
        descriptor = os.open(new, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> bool:
        """Removes a file. Returns whether the file existed."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def exists(self, path: Path) -> bool:
        return path.exists()

    def files(self, directory: Path) -> list[Path]:
        """Returns all files below a directory."""
        return [path for path in directory.rglob("*") if path.is_file()]

    def sync_directory(self, path: Path) -> None:
        """Makes created, changed and removed names in this directory durable."""
        sync_folder(path)

    def forget(self, path: Path) -> None:
        """Drops a durable file's data from the system's memory, so that the next read returns the data on the disk."""
        file = self.open(path)
        try:
            file.forget()
        finally:
            file.close()

    def free_bytes(self, path: Path) -> int:
        """Returns the free bytes of the file system that contains `path`."""
        return shutil.disk_usage(path).free

    def connect(self, path: Path) -> sqlite3.Connection:
        """Opens or creates a database. One thread at a time may use it. Transactions need an explicit BEGIN."""
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)


DISK = Disk()


class ReadOnlyDisk(Disk):
    """The machine's disk, for code that restores a run without changing its directory.

    Removing files, making directories and syncing have no effect. Creating or renaming a file raises OSError.
    """

    def make_directory(self, path: Path) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass

    def remove(self, path: Path) -> bool:
        return self.exists(path)

    def create(self, path: Path) -> WritableFile:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    create_large = create

    def copy(self, old: Path, new: Path, *, link: bool) -> None:  # noqa: ARG002 - as in Disk
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(old), None, str(new))

    def rename(self, old: Path, new: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(old), None, str(new))


class _Written:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, *pieces: bytes | bytearray | memoryview) -> None:
        left = deque[memoryview](memoryview(piece) for piece in pieces)
        while left:
            written = os.writev(self._descriptor, left)
            while left and written >= left[0].nbytes:
                written -= left.popleft().nbytes
            if written:
                left[0] = left[0][written:]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Read:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_at(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)

    def forget(self) -> None:
        if hasattr(os, "posix_fadvise"):  # macOS lacks it
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
