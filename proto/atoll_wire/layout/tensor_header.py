"""The header of a safetensors file, and the names of files in a model's folder. This module does not need NumPy.

A file consists of an eight-byte length, a JSON header, and raw little-endian data. A large model is a folder of files
with an index that maps each tensor's name to its file. Hugging Face's libraries use the same format.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from atoll_wire.errors import UserError

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
LENGTH_BYTES = 8  # a file begins with the header's length
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
MAX_DIMENSIONS = 64  # limit of torch
SUFFIX = ".safetensors"
WHOLE = "model.safetensors"  # the only file of a small model's folder
INDEX = "model.safetensors.index.json"

TensorHead = tuple[str, str, Sequence[int]]  # a tensor's name, its type in the format ("BF16"), and its shape


class Sink(Protocol):
    """A target for a file's bytes."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Appends all bytes of `data`."""


class TensorFileError(UserError):
    """A file is not a safetensors file, or lacks a tensor. The message is one line."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor's place in its file. dtype: the format's own name, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """The size of the tensor's data."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A checked header. base: offset of the data, which is the size of the length and the header."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    base: int


def header_length(head: bytes, size: float) -> int:
    """Returns the length of a header's text. head: the file's first eight bytes. size: the file's size.

    Raises ValueError for an invalid length.
    """
    length = struct.unpack("<Q", head)[0] if len(head) == LENGTH_BYTES else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise ValueError(f"its header has the invalid length {length}")
    return int(length)


def parse_header(text: bytes, size: float) -> TensorHeader:
    """Reads a header and checks every offset. size: the file's size; infinite if unknown.

    Raises ValueError for an invalid header.
    """
    base = LENGTH_BYTES + len(text)
    try:
        header: dict[str, Any] = json.loads(text)
        metadata = header.pop("__metadata__", {})
        entries = {name: _entry(item, base, size) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if sum(entry.size_bytes for entry in entries.values()) > size - base:
        raise ValueError("its tensors overlap")  # otherwise an export, which copies tensors, could be huge
    return TensorHeader(entries, metadata, base)


class StreamedHeader:
    """The header at the start of a stream of a safetensors file's bytes. header: None until it is complete."""

    def __init__(self) -> None:
        self.header: TensorHeader | None = None
        self._head = bytearray()
        self._wanted = LENGTH_BYTES  # number of bytes that must arrive before the next step

    def take(self, data: bytes | memoryview) -> memoryview:
        """Takes the header's next bytes, and returns the rest of `data`. Raises ValueError if the header is invalid."""
        view = memoryview(data)
        while view and self.header is None:
            missing = self._wanted - len(self._head)
            self._head += view[:missing]
            view = view[missing:]
            if len(self._head) == self._wanted == LENGTH_BYTES:
                self._wanted += header_length(bytes(self._head), math.inf)
            elif len(self._head) == self._wanted:
                self.header = parse_header(bytes(self._head[LENGTH_BYTES:]), math.inf)
                self._head.clear()
        return view


def _entry(item: Mapping[str, Any], base: int, size: float) -> TensorEntry:
    shape, (start, stop) = tuple(item["shape"]), item["data_offsets"]
    if not all(type(number) is int for number in (*shape, start, stop)):
        raise ValueError(f"shape {shape} and offsets {start}:{stop} must be whole numbers")
    if len(shape) > MAX_DIMENSIONS or not all(0 <= number < 1 << 63 for number in shape):
        raise ValueError("a tensor has too many or invalid dimensions")  # their product could take hours to compute
    count = math.prod(shape)
    if stop - start != count * BYTES[item["dtype"]] or not 0 <= start <= stop <= size - base:
        raise ValueError(f"a tensor of shape {shape} and type {item['dtype']} cannot have the offsets {start}:{stop}")
    return TensorEntry(item["dtype"], shape, base + start, base + stop)


def in_order(header: TensorHeader) -> list[tuple[str, TensorEntry]]:
    """Returns the tensors in the order of their data."""
    return sorted(header.entries.items(), key=lambda each: (each[1].start, each[1].stop))


def header_bytes(tensors: Sequence[TensorHead], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """Returns a file's header with its length, and the size of the data. The data must follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        header |= header_item(name, dtype, shape, offset)
        offset = header[name]["data_offsets"][1]
    text = encoded(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offset


def header_item(name: str, dtype: str, shape: Sequence[int], offset: int) -> dict[str, dict[str, Any]]:
    """Returns a tensor's item in a header. offset: bytes from the end of the header to its data."""
    stop = offset + BYTES[dtype] * math.prod(shape)
    return {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}}


def encoded(header: Mapping[str, Any]) -> bytes:
    """Returns a header, or a part of one, as JSON text."""
    return json.dumps(header, separators=(",", ":")).encode()


def write_header(file: Sink, tensors: Sequence[TensorHead], metadata: Mapping[str, str] | None = None) -> int:
    """Writes a file's header. The tensors' data must follow in this order. Returns the size of the whole file."""
    head, data_bytes = header_bytes(tensors, metadata)
    file.write(head)
    return len(head) + data_bytes
