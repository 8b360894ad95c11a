"""Writes large files past the page cache, whose memory and copies would cost more than the writes themselves."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

BUFFER_BYTES = 4 << 20  # bytes of one write
BLOCK_BYTES = 4096  # a direct write begins and ends at a multiple of this; some file systems need larger ones
NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}  # errors of file systems that cannot do this direct write


class DirectFile:
    """A file open for appending, see `disk.WritableFile`. `sync` writes the last bytes, so no `write` may follow it."""

    def __init__(self, descriptor: int, buffer: mmap.mmap) -> None:
        """buffer: BUFFER_BYTES bytes, page-aligned."""
        self._descriptor = descriptor
        self._buffer = np.frombuffer(buffer, np.uint8)
        self._filled = 0
        self._size = 0

    @classmethod
    def create(cls, path: Path) -> DirectFile | None:
        """Creates an empty file. Replaces an existing file. Returns None if the system has no direct writes."""
        if not hasattr(os, "O_DIRECT"):
            return None  # macOS
        buffer = mmap.mmap(-1, BUFFER_BYTES)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT, 0o640)
        except OSError as error:
            if error.errno in NOT_DIRECT:
                return None
            raise
        return cls(descriptor, buffer)

    def write(self, *pieces: bytes | bytearray | memoryview) -> None:
        """Appends all pieces. Raises OSError if the write fails."""
        for piece in pieces:
            given = np.frombuffer(piece, np.uint8)
            self._size += len(given)
            while len(given):
                count = min(len(given), BUFFER_BYTES - self._filled)
                np.copyto(self._buffer[self._filled : self._filled + count], given[:count])
                self._filled, given = self._filled + count, given[count:]
                if self._filled == BUFFER_BYTES:
                    self._flush()

    def sync(self) -> None:
        """Makes the data durable."""
        if self._filled:
            self._buffer[self._filled :] = 0
            self._filled = -(-self._filled // BLOCK_BYTES) * BLOCK_BYTES
            self._flush()
            os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file. Without `sync`, its last bytes are lost. Repeated calls are allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _flush(self) -> None:
        view = self._buffer[: self._filled].data
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except OSError as error:
                if error.errno not in NOT_DIRECT or not self._is_direct():
                    raise
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._filled = 0

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT)
