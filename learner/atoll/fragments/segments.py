"""PURE: the coded values of consecutive frames, and kernels that process a whole fragment in one call.

A fragment has many tensors, and its coded values have many frames. Each call of a kernel releases the GIL. Kernels
therefore take memory addresses, so that a step boundary makes one call for all tensors. The caller must keep the memory
alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from atoll_wire.codec import buffers, frame_codec
from atoll_wire.codec.block_kernels import (
    F32,
    INFINITY_BITS,
    add_block,
    bits_of,
    bytes_at,
    coded_bytes,
    fetch_ahead,
    floats_at,
    kernel,
    scale_of,
    scales_at,
)
from atoll_wire.codec.frame_codec import LEVELS, CodecError, Content
from atoll_wire.codec.quantising import encode_block
from atoll_wire.layout.frame_spans import BLOCK, Codec
from atoll_wire.layout.layout import FrameRun
from numpy.typing import NDArray

I64 = NDArray[np.int64]


max_changes_ahead = 8  # see Coder; each takes four bytes per value
ALIGNED = 64  # alignment in bytes of each frame's content in the shared block of memory


@dataclass(frozen=True, slots=True)
class FragmentShape:
    """The positions of a run's segments in the run's vector and in the contents of its frames.

    length: number of values in the run.
    rows: int64 (segments, 5): offset in the run's vector, length, frame of the run, and the byte offsets of codes and
    scales in that frame's content.
    sizes: bytes of each frame's content. levels: largest code; 0 for float32, which stores values instead of codes.
    """

    length: int
    rows: I64
    sizes: tuple[int, ...]
    levels: int

    @classmethod
    def of(cls, run: FrameRun, kind: Codec) -> FragmentShape:
        """Returns the shape of a run whose contents have this codec."""
        frames = run.frames
        rows = np.zeros((sum(len(span.segments) for span in frames), 5), np.int64)
        levels, row = LEVELS[kind], 0
        for number, span in enumerate(frames):
            code_at, scale_at = 0, frame_codec.code_bytes(span, kind)
            for segment in span.segments:
                rows[row] = segment.offset, segment.length, number, code_at, scale_at
                row += 1
                code_at += coded_bytes(segment.length, levels)
                scale_at += 2 * -(-segment.length // BLOCK)
        sizes = tuple(frame_codec.content_bytes(span, kind) for span in frames)
        return cls(run.length, rows, sizes, levels)

    @property
    def places(self) -> list[tuple[int, int]]:
        """The start and end of each frame's content in one block of memory."""
        starts = np.cumsum([0, *(-(-size // ALIGNED) * ALIGNED for size in self.sizes)]).tolist()
        return [(start, start + size) for start, size in zip(starts, self.sizes, strict=False)]


@dataclass(frozen=True, slots=True)
class Coded:
    """Coded values of a run: the contents of its frames (see `frame_codec`). starts: the contents' addresses, int64
    (frames,)."""

    contents: Sequence[Content]
    starts: I64

    @classmethod
    def of(cls, contents: Sequence[Content]) -> Coded:
        """Returns coded values from the contents of all frames, in order."""
        return cls(contents, np.array([content.ctypes.data for content in contents], np.int64))

    @classmethod
    def empty(cls, shape: FragmentShape) -> Coded:
        """Returns uninitialised contents in one block of memory."""
        block = buffers.empty(sum(-(-size // ALIGNED) * ALIGNED for size in shape.sizes) // 4).view(np.uint8)
        return cls.of([block[start:end] for start, end in shape.places])


class Coder(Protocol):
    """Encodes pseudo-gradients and computes changes of parameters. This module is the coder for host memory.

    The results of all coders are bit-identical. The type of values depends on the coder.

    max_changes_ahead: limit on results of `change` that wait for a step boundary, because of their memory.
    """

    @property
    def max_changes_ahead(self) -> int: ...

    def ahead(self, anchor: F32, shape: FragmentShape) -> Callable[[], None] | None:
        """Returns a function that makes a later `code` with this anchor faster, or None. Worker threads call it."""

    def code(self, anchor: F32, values: Any, shape: FragmentShape) -> Coded:  # noqa: ANN401
        """Encodes `anchor - values`, both float32 (shape.length,). Raises CodecError if a value is not finite."""

    def change(self, old: F32, new: F32, update: Coded | None, q: Coded | None, shape: FragmentShape) -> Any:  # noqa: ANN401
        """Returns the values that an adoption adds to the parameters.

        The values are update + q, or new - old + q if the update is unknown.
        old, new: anchors, float32 (shape.length,). update: coded values with new = old + update, or None.
        q: the merged contribution's coded values, or None for zero.
        """


def ahead(anchor: F32, shape: FragmentShape) -> None:
    """Returns None, because anchors are already in host memory."""


def code(anchor: F32, values: F32, shape: FragmentShape) -> Coded:
    """Encodes `anchor - values`, both float32 (shape.length,). Raises CodecError if a value is not finite."""
    return code_in_place(anchor, values.ctypes.data + 4 * shape.rows[:, 0], shape)


def code_in_place(anchor: F32, starts: I64, shape: FragmentShape) -> Coded:
    """Does the same as `code` for values anywhere in memory. starts: as in `add_coded`."""
    coded = Coded.empty(shape)
    if not _code(anchor, starts, shape.rows, shape.levels, coded.starts):
        raise CodecError("a value is not finite")
    return coded


def change(old: F32, new: F32, update: Coded | None, q: Coded | None, shape: FragmentShape) -> F32:
    """Returns the values that an adoption adds to the parameters, float32 (shape.length,). See Coder."""
    out = buffers.empty(shape.length)
    if update is None:
        np.subtract(new, old, out=out)
    else:
        out[:] = 0.0
    add_coded([coded for coded in (update, q) if coded is not None], shape, out.ctypes.data + 4 * shape.rows[:, 0])
    return out


def add_coded(coded: Sequence[Coded], shape: FragmentShape, starts: I64) -> None:
    """Adds the sum of coded values to values in memory: each value gets one addition.

    starts: int64 (segments,), address of each segment's first float32 value.
    """
    if coded:
        _add_coded(np.stack([each.starts for each in coded]), shape.rows, shape.levels, starts)


def gather(starts: I64, rows: I64, out: F32) -> None:
    """Copies runs of values from memory to `out`.

    starts: int64 (runs,), address of each run. rows: int64 (runs, 2 or more), position in `out` and length of each run.
    """
    _gather(starts, rows, out)


def store(values: F32, starts: I64, rows: I64) -> None:
    """Copies values to runs in memory: the inverse of `gather`."""
    _store(values, starts, rows)


def add(values: F32, starts: I64, rows: I64) -> None:
    """Adds values to runs in memory. The arguments are those of `store`."""
    _add(values, starts, rows)


@kernel
def _code(anchor: F32, starts: I64, rows: I64, levels: int, frames: I64) -> bool:
    block = np.empty(BLOCK, np.float32)
    for row in range(len(rows)):
        at = rows[row, 0]
        length = rows[row, 1]
        frame = frames[rows[row, 2]]
        code_at = frame + rows[row, 3]
        scales = scales_at(frame + rows[row, 4], (length + BLOCK - 1) // BLOCK)
        given, local = anchor[at : at + length], floats_at(starts[row], length)
        for start in range(0, length, BLOCK):
            n = min(BLOCK, length - start)
            fetch_ahead(given, start)
            fetch_ahead(local, start)
            part, base, mine = block[:n], given[start : start + n], local[start : start + n]
            for i in range(n):
                part[i] = base[i] - mine[i]
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
def _add_coded(coded: I64, rows: I64, levels: int, starts: I64) -> None:
    # coded: int64 (coded values, frames), addresses of contents.
    block = np.empty(BLOCK, np.float32)
    for row in range(len(rows)):
        length = rows[row, 1]
        local = floats_at(starts[row], length)
        for start in range(0, length, BLOCK):
            stop = min(start + BLOCK, length)
            size = coded_bytes(stop - start, levels)
            code_at = rows[row, 3] + coded_bytes(start, levels)
            scale_at = rows[row, 4] + 2 * (start // BLOCK)
            fetch_ahead(local, start)
            part = block[: stop - start]
            part[:] = 0.0
            for each in range(len(coded)):
                frame = coded[each, rows[row, 2]]
                if levels == 0:
                    values = floats_at(frame + code_at, stop - start)
                    for i in range(len(part)):
                        part[i] += values[i]
                else:
                    add_block(
                        bytes_at(frame + code_at, size), scale_of(scales_at(frame + scale_at, 1)[0]), levels, part
                    )
            target = local[start:stop]
            for i in range(len(part)):
                target[i] += part[i]


@kernel
def _gather(starts: I64, rows: I64, out: F32) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        local, result = floats_at(starts[row], length), out[at : at + length]
        for i in range(length):
            result[i] = local[i]


@kernel
def _store(values: F32, starts: I64, rows: I64) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        given, local = values[at : at + length], floats_at(starts[row], length)
        for i in range(length):
            local[i] = given[i]


@kernel
def _add(values: F32, starts: I64, rows: I64) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        given, local = values[at : at + length], floats_at(starts[row], length)
        for i in range(length):
            local[i] += given[i]


def warm_up() -> None:
    """Compiles the kernels or loads them from disk. Call this function before the model trains."""
    shape, vector = FragmentShape(1, np.array([[0, 1, 0, 0, 1]], np.int64), (3,), 7), np.ones(1, np.float32)
    changed = change(vector, vector, None, code(vector, vector, shape), shape)
    starts, rows = np.array([vector.ctypes.data], np.int64), np.array([[0, 1]], np.int64)
    gather(starts, rows, changed)
    store(changed, starts, rows)
    add(changed, starts, rows)
