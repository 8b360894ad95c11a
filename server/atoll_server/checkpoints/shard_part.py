"""Writes a shard's part of the initial parameters as a safetensors file.

The file contains the pieces of the shard's fragments, in the types of the whole file. A piece of a divided tensor has
the same name as in the layout, such as "embedding[0:4096]".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from atoll_wire.layout.layout import FragmentLayout, Layout, Piece
from atoll_wire.layout.tensor_header import BYTES, TensorHead, header_bytes

from atoll_server.checkpoints.tensor_file import TensorFile

CHUNK_BYTES = 1 << 20


def pieces_of(layout: Layout, fragments: Collection[int]) -> Iterator[tuple[FragmentLayout, Piece]]:
    """Yields the pieces of these fragments, in the order of the fragments."""
    for number in sorted(fragments):
        fragment = layout.fragments[number]
        for piece in fragment.pieces:
            yield fragment, piece


def part_chunks(layout: Layout, initial: TensorFile, fragments: Collection[int]) -> Iterator[bytes]:
    """Yields the part for these fragments in chunks. initial: the whole file."""
    heads: list[TensorHead] = []
    for _, piece in pieces_of(layout, fragments):
        heads.append((piece.name, initial.entries[layout.tensors[piece.tensor].name].dtype, (piece.length,)))
    yield header_bytes(heads)[0]
    for (_, piece), (_, dtype, _) in zip(pieces_of(layout, fragments), heads, strict=True):
        width = BYTES[dtype]
        raw = initial.raw(layout.tensors[piece.tensor].name)[width * piece.start :][: width * piece.length]
        for at in range(0, len(raw), CHUNK_BYTES):
            yield raw[at : at + CHUNK_BYTES].tobytes()
        initial.forget()
