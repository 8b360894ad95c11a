"""Reads safetensors files through a memory map.

The safetensors library's NumPy interface lacks bfloat16 and needs all tensors in memory at once. `tensor_header`
describes the format. Tests compare this module and `tensor_header` with the safetensors library.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from atoll_wire.layout.tensor_header import (
    LENGTH_BYTES,
    TensorEntry,
    TensorFileError,
    TensorHeader,
    header_length,
    parse_header,
)
from numpy.typing import NDArray

from atoll_server.storage.disk import DISK, Disk, ReadableFile


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open safetensors file. data: memory map of the file; only accessed parts are read from disk."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data: NDArray[np.uint8]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Returns a view of a tensor's bytes as stored in the file: uint8 (bytes,)."""
        entry = self.entries[name]
        return self.data[entry.start : entry.stop]

    def forget(self) -> None:
        """Releases the memory of the parts of the file that were read. Later accesses read these parts again."""
        if isinstance(self.data.base, mmap.mmap):
            self.data.base.madvise(mmap.MADV_DONTNEED)

    def float32(self, name: str) -> NDArray[np.float32]:
        """Returns a trainable tensor as a flat vector: float32 (elements,).

        The values are exact, since float32 can represent all bfloat16 and float16 values. Raises TensorFileError if the
        tensor has a different type.
        """
        dtype, raw = self.entries[name].dtype, self.raw(name)
        if dtype == "F32":
            return raw.view("<f4")
        if dtype == "F16":
            return raw.view("<f2").astype(np.float32)
        if dtype == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        raise TensorFileError(
            f'{self.path}: tensor "{name}" has type {dtype}, which cannot be trained: use F32, BF16 or F16'
        )


def open_tensors(path: Path, disk: Disk = DISK) -> TensorFile:
    """Checks every offset in a file's header and maps the file to memory.

    Raises TensorFileError if the file is missing or invalid.
    """
    try:
        opened = disk.open(path)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        fix = "restore it from a backup" if is_missing else "check its permissions and the disk"
        raise TensorFileError(f"{path} cannot be read ({error.strerror}): {fix}") from error
    with closing(opened) as file:
        header = read_header(path, file)
    data = disk.map(path) if file.size > header.base else np.empty(header.base, np.uint8)
    return TensorFile(path, header.entries, header.metadata, data)


def read_header(path: Path, file: ReadableFile) -> TensorHeader:
    """Reads and checks a file's header. path: path to show in error messages. Raises TensorFileError."""
    try:
        length = header_length(file.read_at(0, LENGTH_BYTES), file.size)
        return parse_header(file.read_at(LENGTH_BYTES, length), file.size)
    except ValueError as error:
        raise TensorFileError(f"{path} is not a safetensors file ({error}): replace it with an intact file") from error
