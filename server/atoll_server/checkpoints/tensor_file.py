"""Writes safetensors files as a stream, and reads them through a memory map.

The numpy interface of the safetensors library does not support bfloat16, and needs all tensors in memory at once. A
file consists of an eight-byte length, a JSON header, and raw little-endian data. Tests compare this module with the
library.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from atoll_wire.errors import UserError
from numpy.typing import NDArray

from atoll_server.storage.disk import DISK, Disk

BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "C64": 8,
}
FORMAT_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # trainable tensors have one of these types
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMENSIONS = 64  # the limit of torch


class Sink(Protocol):
    """A target for `write_header` and `write_data`."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Appends all of the data."""


class TensorFileError(UserError):
    """A file is unreadable or is not a valid safetensors file. The message is one line."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in its file. dtype: the format's name, such as "BF16". start, stop: offsets in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open safetensors file. data: its memory map, so that only accessed parts are read from disk."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data: NDArray[np.uint8]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Returns a view of a tensor's bytes as stored in the file: uint8 (bytes,)."""
        entry = self.entries[name]
        return self.data[entry.start : entry.stop]

    def forget(self) -> None:
        """Releases the memory used by parts of the file that were read. Later accesses read these parts again."""
        if isinstance(self.data.base, mmap.mmap):
            self.data.base.madvise(mmap.MADV_DONTNEED)

    def float32(self, name: str) -> NDArray[np.float32]:
        """Returns a trainable tensor as a flat vector: float32 (elements,).

        The values are exact, since float32 can represent all bfloat16 and float16 values. Raises TensorFileError if the
        tensor has another type.
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
    """Checks every offset in a file's header, and maps the file. Raises TensorFileError if it is missing or invalid."""
    try:
        opened = disk.open(path)
    except OSError as error:
        raise TensorFileError(f"{path} cannot be read ({error.strerror}): restore it from a backup") from error
    with closing(opened) as file:
        size, head = file.size, file.read_at(0, 8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise TensorFileError(
                f"{path} is not a safetensors file: its header claims {length} bytes of {size}; use another file"
            )
        try:
            header: dict[str, Any] = json.loads(file.read_at(8, length))
            metadata = header.pop("__metadata__", {})
            base = 8 + length
            entries = {name: _entry(item, base, size) for name, item in header.items()}
            if sum(entry.stop - entry.start for entry in entries.values()) > size - base:
                raise ValueError("its tensors overlap")  # otherwise an export, which copies tensors, could be huge
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise TensorFileError(f"{path} is not a safetensors file: {error}; use another file") from error
    data = disk.map(path) if size > base else np.empty(base, np.uint8)
    return TensorFile(path, entries, metadata, data)


def _entry(item: Mapping[str, Any], base: int, size: int) -> TensorEntry:
    shape, (start, stop) = tuple(item["shape"]), item["data_offsets"]
    if not all(type(number) is int for number in (*shape, start, stop)):
        raise ValueError(f"shape {shape} and offsets {start}:{stop} must be whole numbers")
    if len(shape) > MAX_DIMENSIONS or not all(0 <= number < 1 << 63 for number in shape):
        raise ValueError("a tensor has too many or invalid dimensions")  # their product could take hours to compute
    count = math.prod(shape)
    if stop - start != count * BYTES[item["dtype"]] or not 0 <= start <= stop <= size - base:
        raise ValueError(f"a tensor of shape {shape} and type {item['dtype']} cannot have the offsets {start}:{stop}")
    return TensorEntry(item["dtype"], shape, base + start, base + stop)


def write_header(
    file: Sink, tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> int:
    """Writes a file's header. tensors: (name, format dtype, shape). The tensors' data must follow in this order.

    Returns the size of the whole file in bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        size = BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return 8 + len(text) + offset


def write_data(file: Sink, array: NDArray[Any]) -> None:
    """Appends one tensor's data in C order, in the array's own type."""
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def cast_float32(vector: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Returns a float32 vector in another type of FORMAT_NAME. For bfloat16, rounds to nearest even, as torch does."""
    if dtype == "F32":
        return vector.astype("<f4", copy=False)
    if dtype == "F16":
        with np.errstate(over="ignore"):  # values beyond the range of float16 become infinite, as in torch
            return vector.astype("<f2")
    assert dtype == "BF16", f"no trainable tensor has type {dtype}"
    bits = vector.view(np.uint32)
    rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    rounded[np.isnan(vector)] = 0x7FC0
    return rounded
