"""The one door to the machine's disk: files, names and the database. What is durable, and when, is said here once.

Everything that a core keeps goes through a `Disk`, so that a disk that loses what was not synced, tears writes, fills
up or fails can be put in its place.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class WritableFile(Protocol):
    """A file that is being written; nothing of it is durable before `sync`."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends all of it. OSError when the disk refuses."""

    def sync(self) -> None:
        """Makes what was written durable; its name is so only after `Disk.sync_directory`."""

    def close(self) -> None:
        """Lets go of it; twice is allowed."""


class ReadableFile(Protocol):
    """A file that is read by place."""

    size: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Bytes from there; fewer at the end of the file."""

    def close(self) -> None:
        """Lets go of it; twice is allowed."""


class Disk:
    """The machine's own. Any thread may call."""

    def make_directory(self, path: Path) -> None:
        """With its parents; an existing one is fine. Durable after `sync_directory` of its parent."""
        path.mkdir(parents=True, exist_ok=True)

    def lock(self, path: Path) -> Callable[[], None]:
        """Takes an exclusive lock that ends with the process, or by calling what is returned.

        BlockingIOError when another process has it.
        """
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return lambda: os.close(descriptor)

    def create(self, path: Path) -> WritableFile:
        """An empty file, in the place of any other."""
        return _Written(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o640))

    def open(self, path: Path) -> ReadableFile:
        """An existing file."""
        return _Read(os.open(path, os.O_RDONLY))

    def map(self, path: Path) -> NDArray[np.uint8]:
        """A file's bytes, read when they are touched. It must not be empty."""
        return np.memmap(path, dtype=np.uint8, mode="r")

    def rename(self, old: Path, new: Path) -> None:
        """In one step, in the place of any other file."""
        old.rename(new)

    def remove(self, path: Path) -> bool:
        """Whether there was one to remove."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def exists(self, path: Path) -> bool:
        """Whether a file has this name."""
        return path.exists()

    def files(self, directory: Path) -> list[Path]:
        """All files below a directory."""
        return [path for path in directory.rglob("*") if path.is_file()]

    def sync_directory(self, path: Path) -> None:
        """Makes names given and taken in this directory durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: Path) -> int:
        """What may still be written."""
        return shutil.disk_usage(path).free

    def connect(self, path: Path) -> sqlite3.Connection:
        """A database, created when there is none; for one thread at a time, transactions begun by hand."""
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)


DISK = Disk()


class _Written:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

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

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
