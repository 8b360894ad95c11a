"""The fixed values of a run: everything in the model's file that training does not change, as one safetensors file.

The file contains the tensors of the initial parameters in the same order. Its trained tensors are empty, because
readers fetch their values as fragments. The metadata describes the trained tensors. Readers fetch the file in frames of
FRAME_BYTES.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll_wire.layout.layout import Layout, TensorSpec
from atoll_wire.layout.tensor_data import tensors_as_data, tensors_from_data
from atoll_wire.layout.tensor_header import (
    LENGTH_BYTES,
    TensorEntry,
    TensorFileError,
    TensorHead,
    header_bytes,
    header_length,
    parse_header,
)
from atoll_wire.model_file.metadata_keys import BUFFERS, FROZEN, LISTED
from atoll_wire.model_file.model_file import InitialTensors, owners_of

FRAME_BYTES = 1 << 20
TENSORS = "atoll.tensors"  # key in the metadata: the trained tensors as JSON


def frame_count(size_bytes: int) -> int:
    """Returns the number of frames for a file of this size."""
    return -(-size_bytes // FRAME_BYTES)


class FixedFrames:
    """The fixed values of a run, cut into frames. size_bytes: the file's size. initial: must stay open."""

    def __init__(self, layout: Layout, initial: InitialTensors) -> None:
        owners = owners_of(layout)
        heads: list[TensorHead] = [
            (name, entry.dtype, (0,) if name in owners else entry.shape) for name, entry in initial.entries.items()
        ]
        metadata = {TENSORS: json.dumps(tensors_as_data(layout.tensors))}
        metadata |= {key: initial.metadata[key] for key in (LISTED, BUFFERS, FROZEN) if key in initial.metadata}
        head = np.frombuffer(header_bytes(heads, metadata)[0], np.uint8)
        fixed = [name for name in initial.entries if name not in owners]
        self._initial = initial
        self._parts = [head, *(initial.raw(name) for name in fixed)]
        self._starts = [0, *accumulate(map(len, self._parts))]
        self.size_bytes = self._starts[-1]

    @property
    def count(self) -> int:
        """The number of frames."""
        return frame_count(self.size_bytes)

    def frame(self, index: int) -> bytes:
        """Returns the bytes of a frame. May read from the disk."""
        at, stop = index * FRAME_BYTES, min((index + 1) * FRAME_BYTES, self.size_bytes)
        found = list[bytes]()
        part = bisect_right(self._starts, at) - 1
        while at < stop:
            start = self._starts[part]
            piece = self._parts[part][at - start : stop - start]
            found.append(piece.tobytes())
            at += len(piece)
            part += 1
        return b"".join(found)


@dataclass(frozen=True, slots=True)
class FixedValues:
    """The fixed values that a reader received. tensors: the trained tensors, whose entries are empty."""

    tensors: tuple[TensorSpec, ...]
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    content: NDArray[np.uint8]

    @classmethod
    def read(cls, content: NDArray[np.uint8]) -> FixedValues:
        """Reads the file. content: uint8 (bytes,). Raises TensorFileError if the file is invalid."""
        size = len(content)
        try:
            base = LENGTH_BYTES + header_length(content[:LENGTH_BYTES].tobytes(), size)
            header = parse_header(content[LENGTH_BYTES:base].tobytes(), size)
            tensors = _sound(tensors_from_data(json.loads(header.metadata[TENSORS])))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            text = f"the fixed values of the run are invalid ({error!r}): use the same version of Atoll on both sides"
            raise TensorFileError(text) from error
        return cls(tensors, header.entries, header.metadata, content)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Returns the bytes of a tensor that is not trained: uint8 (bytes,)."""
        entry = self.entries[name]
        return self.content[entry.start : entry.stop]


def _sound(tensors: list[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Returns the tensors as a tuple. Raises ValueError for values of wrong types, which another process sent."""
    for tensor in tensors:
        texts: tuple[Any, ...] = (tensor.name, tensor.dtype, *tensor.tied_names)
        if not all(type(text) is str for text in texts):
            raise ValueError("a name is not a string")
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in tensor.shape):
            raise ValueError("a shape is not a list of sizes")
    return tuple(tensors)
