"""PURE: the addresses of a fragment's values in memory, and kernels that process them in one pass and one call.

A fragment's parameters are many tensors, and its coded values are many frames. Each call releases the GIL. Kernels
therefore take addresses, and a step boundary makes one call for all tensors. The code that computes addresses keeps the
memory alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from atoll_wire.codec import buffers, frame_codec
from atoll_wire.codec.block_kernels import (
    F32,
    INFINITY_BITS,
    bits_of,
    bytes_at,
    coded_bytes,
    fetch_ahead,
    floats_at,
    kernel,
    rebase_block,
    scale_of,
    scales_at,
)
from atoll_wire.codec.frame_codec import LEVELS, CodecError, Content
from atoll_wire.codec.quantising import encode_block
from atoll_wire.layout.frame_spans import BLOCK, Codec
from atoll_wire.layout.layout import FrameRun
from numpy.typing import NDArray

I64 = NDArray[np.int64]


ALIGNED = 64  # bytes; contents are stored one after another, and each begins at a multiple of this


@dataclass(frozen=True, slots=True)
class FragmentShape:
    """The segments of a run of frames.

    rows: int64 (segments, 5): offset in the run's vector, length, frame of the run, and the offsets of the segment's
    codes and scales in that frame's content. pieces: each segment's piece number and offset in that piece.
    sizes: bytes of each frame's content. levels: largest code; 0 for float32, which has values in place of codes.
    """

    length: int
    rows: I64
    pieces: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    levels: int

    @classmethod
    def of(cls, run: FrameRun, kind: Codec) -> FragmentShape:
        """Returns the shape of a run whose contents have this codec."""
        rows = []
        pieces = []
        levels = LEVELS[kind]
        for number, span in enumerate(run.frames):
            code_at, scale_at = 0, frame_codec.code_bytes(span, kind)
            for segment in span.segments:
                rows.append((segment.offset, segment.length, number, code_at, scale_at))
                piece = run.fragment.pieces[segment.piece]
                pieces.append((segment.piece, run.offset + segment.offset - piece.offset))
                code_at += coded_bytes(segment.length, levels)
                scale_at += 2 * -(-segment.length // BLOCK)
        sizes = tuple(frame_codec.content_bytes(span, kind) for span in run.frames)
        return cls(run.length, np.array(rows, np.int64), tuple(pieces), sizes, levels)


@dataclass(frozen=True, slots=True)
class SegmentAddresses:
    """Addresses of each segment's float32 values. owner: the object that keeps the memory alive."""

    starts: I64
    owner: object

    @classmethod
    def in_vector(cls, vector: F32, shape: FragmentShape) -> SegmentAddresses:
        """Returns addresses in a run's vector, float32 (shape.length,), contiguous."""
        assert vector.flags.c_contiguous and len(vector) == shape.length, "a vector of the run"  # noqa: PT018
        return cls(shape.rows[:, 0] * 4 + vector.ctypes.data, vector)

    @classmethod
    def in_pieces(cls, addresses: Sequence[int], shape: FragmentShape, owner: object) -> SegmentAddresses:
        """Returns addresses in the fragment's pieces. addresses: address of each piece's first value."""
        return cls(np.array([addresses[piece] + 4 * offset for piece, offset in shape.pieces], np.int64), owner)


@dataclass(frozen=True, slots=True)
class Coded:
    """Coded values of a run: the contents of its frames (see `frame_codec`). starts: addresses of the contents."""

    contents: Sequence[Content]
    starts: I64

    @classmethod
    def of(cls, contents: Sequence[Content]) -> Coded:
        """Returns coded values from the contents of all frames, in order."""
        return cls(contents, np.array([content.ctypes.data for content in contents], np.int64))

    @classmethod
    def empty(cls, shape: FragmentShape) -> Coded:
        """Returns contents that are not written yet, in one block of memory."""
        ends = np.cumsum([-(-size // ALIGNED) * ALIGNED for size in shape.sizes])
        block = buffers.empty(int(ends[-1]) // 4).view(np.uint8)
        starts = [0, *ends[:-1]]
        return cls.of([block[start : start + size] for start, size in zip(starts, shape.sizes, strict=True)])


NO_FRAMES = np.empty(0, np.int64)


def take(origin: F32, places: SegmentAddresses, shape: FragmentShape) -> Coded:
    """Codes origin - values, where the values are at `places`. Raises CodecError if a value is not finite.

    origin: float32 (length,).
    """
    coded = Coded.empty(shape)
    if not _take(origin, places.starts, shape.rows, shape.levels, coded.starts):
        raise CodecError("a value is not finite")
    return coded


def rebase(origin: F32, anchor: F32, q: Coded | None, places: SegmentAddresses, shape: FragmentShape) -> None:
    """values at `places` = anchor - (origin - values - q), in place. origin, anchor: float32 (length,)."""
    _rebase(origin, anchor, NO_FRAMES if q is None else q.starts, places.starts, shape.rows, shape.levels)


def load(places: SegmentAddresses, shape: FragmentShape) -> F32:
    """Copies the values at `places` to a new vector, float32 (length,)."""
    out = np.empty(shape.length, np.float32)
    _load(places.starts, shape.rows, out)
    return out


def gather(starts: I64, rows: I64, out: F32) -> None:
    """Same as `load`, but copies into `out`. starts, rows: need not belong to a fragment."""
    _load(starts, rows, out)


def store(vector: F32, places: SegmentAddresses, shape: FragmentShape) -> None:
    """Writes a vector, float32 (length,), to `places`."""
    _store(vector, places.starts, shape.rows)


@kernel
def _take(origin: F32, starts: I64, rows: I64, levels: int, frames: I64) -> bool:
    block = np.empty(BLOCK, np.float32)
    for row in range(len(rows)):
        at = rows[row, 0]
        length = rows[row, 1]
        frame = frames[rows[row, 2]]
        local, code_at = floats_at(starts[row], length), frame + rows[row, 3]
        scales = scales_at(frame + rows[row, 4], (length + BLOCK - 1) // BLOCK)
        for start in range(0, length, BLOCK):
            n = min(BLOCK, length - start)
            fetch_ahead(origin, at + start)
            fetch_ahead(local, start)
            part = block[:n]
            given = origin[at + start : at + start + n]
            mine = local[start : start + n]
            for i in range(n):
                part[i] = given[i] - mine[i]
            if levels == 0:
                floats_at(code_at, n)[:] = part
                for i in range(n):
                    if bits_of(part[i]) & INFINITY_BITS == INFINITY_BITS:
                        return False
            else:
                bits = encode_block(part, levels, bytes_at(code_at, coded_bytes(n, levels)))
                if bits < 0:
                    return False
                scales[start // BLOCK] = bits
            code_at += coded_bytes(n, levels)
    return True


@kernel
def _load(starts: I64, rows: I64, out: F32) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        local, result = floats_at(starts[row], length), out[at : at + length]
        for i in range(length):
            result[i] = local[i]


@kernel
def _store(vector: F32, starts: I64, rows: I64) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        given, local = vector[at : at + length], floats_at(starts[row], length)
        for i in range(length):
            local[i] = given[i]


@kernel
def _rebase(origin: F32, anchor: F32, frames: I64, starts: I64, rows: I64, levels: int) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        old = origin[at : at + length]
        new = anchor[at : at + length]
        local = floats_at(starts[row], length)
        if len(frames) == 0:
            for i in range(length):
                local[i] = new[i] - (old[i] - local[i])
        elif levels == 0:
            q = floats_at(frames[rows[row, 2]] + rows[row, 3], length)
            for i in range(length):
                local[i] = new[i] - (old[i] - local[i] - q[i])
        else:
            frame = frames[rows[row, 2]]
            scales = scales_at(frame + rows[row, 4], (length + BLOCK - 1) // BLOCK)
            codes, code_at = bytes_at(frame + rows[row, 3], coded_bytes(length, levels)), 0
            for start in range(0, length, BLOCK):
                stop = min(start + BLOCK, length)
                size = coded_bytes(stop - start, levels)
                for values in (old, new, local):
                    fetch_ahead(values, start)
                block, scale = codes[code_at : code_at + size], scale_of(scales[start // BLOCK])
                rebase_block(old[start:stop], new[start:stop], block, scale, levels, local[start:stop])
                code_at += size


def warm_up() -> None:
    """Compiles the kernels, or loads them from disk, so that nothing compiles while a model trains."""
    shape = FragmentShape(1, np.array([[0, 1, 0, 0, 1]], np.int64), ((0, 0),), (3,), 7)
    vector = np.ones(1, np.float32)
    places = SegmentAddresses.in_vector(vector, shape)
    coded = take(vector, places, shape)
    load(places, shape)
    store(vector.copy(), places, shape)
    rebase(vector.copy(), vector.copy(), coded, places, shape)
