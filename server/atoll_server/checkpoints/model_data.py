"""Writes a whole model's data fragment by fragment, in any order, so that no process needs the whole model in memory.

The result is byte for byte the file that `model_file.write_model` writes. A fragment may come from another shard as a
part, which is a safetensors file with the fragment's pieces in the model's own types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, BinaryIO

from atoll_wire.layout.layout import FragmentLayout, Layout, Piece
from atoll_wire.layout.tensor_header import (
    BYTES,
    LENGTH_BYTES,
    Sink,
    TensorHead,
    TensorHeader,
    header_bytes,
    header_length,
    parse_header,
    write_header,
)
from atoll_wire.model_file.metadata_keys import VERSIONS
from atoll_wire.model_file.model_file import RunId, heads_of, metadata_of
from atoll_wire.model_file.tensor_values import FORMAT_NAME, cast_float32, write_data
from numpy.typing import NDArray

from atoll_server.checkpoints.tensor_file import TensorFile
from atoll_server.merging.merge import FragmentState


class PartError(ValueError):
    """A part is not a safetensors file that contains exactly the fragment's pieces."""


class ModelData:
    """The data of a whole model.

    file: an empty file, open for writing at any position. initial: the initial parameters.
    """

    def __init__(self, file: BinaryIO, layout: Layout, initial: TensorFile, run: RunId) -> None:
        self._run = run
        self._file = file
        self._layout = layout
        self._initial = initial
        self._heads = heads_of(layout, initial)
        self._versions: dict[int, int] = {}
        self._starts: dict[str, int] = {}
        at = 0
        for name, dtype, shape in self._heads:
            self._starts[name] = at
            at += BYTES[dtype] * math.prod(shape)

    def copy_fixed(self) -> None:
        """Copies the frozen tensors and buffers from the initial parameters."""
        trained = {name for tensor in self._layout.tensors for name in (tensor.name, *tensor.tied_names)}
        for name, start in self._starts.items():
            if name not in trained:
                self._file.seek(start)
                write_data(self._file, self._initial.raw(name))
                self._initial.forget()

    def add(self, fragment: FragmentLayout, state: FragmentState) -> None:
        """Writes a fragment's published parameters."""
        for piece in fragment.pieces:
            self.write_piece(piece, 0, _cast(self._layout, piece, state))
        self._versions[fragment.index] = state.version

    def part(self, fragment: FragmentLayout) -> PartWriter:
        """Returns the writer of a fragment that arrives as a part."""
        return PartWriter(self, self._layout, fragment)

    def added(self, fragment: int, version: int) -> None:
        """Records that a fragment is complete."""
        self._versions[fragment] = version

    def write_piece(self, piece: Piece, offset: int, data: Any) -> None:  # noqa: ANN401 - any buffer
        """Writes bytes of a piece, starting at a byte offset within the piece, under all names of the tensor."""
        tensor = self._layout.tensors[piece.tensor]
        width = BYTES[FORMAT_NAME[tensor.dtype]]
        for name in (tensor.name, *tensor.tied_names):
            self._file.seek(self._starts[name] + width * piece.start + offset)
            self._file.write(memoryview(data).cast("B"))

    def header(self) -> bytes:
        """Returns the header that precedes the data. All fragments must have been added."""
        return header_bytes(self._heads, metadata_of(self._layout, self._initial, self._versions, self._run))[0]


class PartWriter:
    """Writes a fragment that arrives as a part, in chunks of any size."""

    def __init__(self, model: ModelData, layout: Layout, fragment: FragmentLayout) -> None:
        self._model = model
        self._layout = layout
        self._fragment = fragment
        self._head = b""
        self._header: TensorHeader | None = None
        self._left = [(piece, 0) for piece in reversed(fragment.pieces)]  # pieces and their written bytes, last first

    def take(self, chunk: bytes) -> None:
        """Writes a chunk. Raises PartError if the part differs from the fragment."""
        if self._header is None:
            self._head += chunk
            if (chunk := self._begun()) == b"":
                return
        while chunk:
            if not self._left:
                raise PartError(f"the part of fragment {self._fragment.index} is too long")
            piece, offset = self._left.pop()
            width = BYTES[FORMAT_NAME[self._layout.tensors[piece.tensor].dtype]]
            mine = chunk[: width * piece.length - offset]
            self._model.write_piece(piece, offset, mine)
            if offset + len(mine) < width * piece.length:
                self._left.append((piece, offset + len(mine)))
            chunk = chunk[len(mine) :]

    def _begun(self) -> bytes:
        """Reads the header once it is complete. Returns the data after the header, or no bytes before that."""
        if len(self._head) < LENGTH_BYTES:
            return b""
        try:
            stop = LENGTH_BYTES + header_length(self._head[:LENGTH_BYTES], math.inf)
            if len(self._head) < stop:
                return b""
            header = parse_header(self._head[LENGTH_BYTES:stop], math.inf)
        except ValueError as error:
            raise PartError(f"the part of fragment {self._fragment.index} is invalid: {error}") from error
        found = [(name, each.dtype, each.shape) for name, each in header.entries.items()]
        if found != part_heads(self._layout, self._fragment) or not header.metadata.get(VERSIONS, "").isdecimal():
            raise PartError(f"the pieces of fragment {self._fragment.index} differ from this run's")
        self._header = header
        data, self._head = self._head[stop:], b""
        return data

    def finish(self) -> None:
        """Records that the fragment is complete. Raises PartError if bytes are missing."""
        if self._header is None or self._left:
            raise PartError(f"the part of fragment {self._fragment.index} ended early")
        self._model.added(self._fragment.index, int(self._header.metadata[VERSIONS]))


def part_heads(layout: Layout, fragment: FragmentLayout) -> list[TensorHead]:
    """Returns the tensors of a fragment's part: its pieces, in order."""
    return [(piece.name, FORMAT_NAME[layout.tensors[piece.tensor].dtype], (piece.length,)) for piece in fragment.pieces]


def write_part(file: Sink, layout: Layout, fragment: FragmentLayout, state: FragmentState) -> None:
    """Writes a fragment's published parameters as a part."""
    heads: Sequence[TensorHead] = part_heads(layout, fragment)
    write_header(file, heads, {VERSIONS: str(state.version)})
    for piece in fragment.pieces:
        write_data(file, _cast(layout, piece, state))


def _cast(layout: Layout, piece: Piece, state: FragmentState) -> NDArray[Any]:
    values = state.theta_pub[piece.offset : piece.offset + piece.length]
    return cast_float32(values, FORMAT_NAME[layout.tensors[piece.tensor].dtype])
