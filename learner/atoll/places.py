"""Where the values of a fragment lie, and the kernels that go over them: in one pass, and in one call.

A fragment's parameters are many tensors, its coded values many frames. Kernels are given addresses, so that a step
boundary makes one call for all of them: each call gives the interpreter away. Whoever makes addresses keeps what they
point to alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from atoll_wire import memory
from atoll_wire.codec import LEVELS, Codec
from atoll_wire.kernels import kernel
from atoll_wire.layout import Fragment
from atoll_wire.spans import BLOCK
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    """A fragment, segment by segment in the order of its frames.

    rows: int64 (segments, 5): offset in the fragment's vector, length, frame, and where in that frame's content the
    segment's codes and scales begin. pieces: of each segment, and its offset in that piece. levels: of the codec; 0
    for float32, whose codes are the values themselves.
    """

    length: int
    rows: I64
    pieces: tuple[tuple[int, int], ...]
    levels: int

    @classmethod
    def of(cls, fragment: Fragment, codec: Codec) -> Shape:
        """For contents of this codec."""
        rows, pieces = [], []
        for span in fragment.frames:
            code_at = 0
            scale_at = span.packed_bytes if codec is Codec.INT4 else span.length
            for segment in span.segments:
                rows.append((segment.offset, segment.length, span.index, code_at, scale_at))
                pieces.append((segment.piece, segment.offset - fragment.pieces[segment.piece].offset))
                code_at += {
                    Codec.INT4: (segment.length + 1) // 2, Codec.INT8: segment.length, Codec.FLOAT32: 4 * segment.length
                }[codec]  # fmt: skip
                scale_at += 2 * -(-segment.length // BLOCK)
        return cls(fragment.length, np.array(rows, np.int64), tuple(pieces), LEVELS.get(codec, 0))


@dataclass(frozen=True, slots=True)
class Places:
    """Where each segment's float32 values begin in memory. owner: what that memory belongs to."""

    starts: I64
    owner: object

    @classmethod
    def in_vector(cls, vector: F32, shape: Shape) -> Places:
        """Of a vector of the fragment."""
        assert vector.flags.c_contiguous and len(vector) == shape.length, "a vector of the fragment"  # noqa: PT018
        return cls(shape.rows[:, 0] * 4 + vector.ctypes.data, vector)

    @classmethod
    def in_pieces(cls, addresses: Sequence[int], shape: Shape, owner: object) -> Places:
        """Of pieces that begin at these addresses."""
        return cls(np.array([addresses[piece] + 4 * offset for piece, offset in shape.pieces], np.int64), owner)


@dataclass(frozen=True, slots=True)
class Coded:
    """Values of a fragment as contents of its frames, as `codec` makes them. starts: addresses of the contents."""

    contents: Sequence[U8]
    starts: I64

    @classmethod
    def of(cls, contents: Sequence[U8]) -> Coded:
        """All frames in order."""
        return cls(contents, np.array([content.ctypes.data for content in contents], np.int64))


NO_FRAMES = np.empty(0, np.int64)


def difference(origin: F32, places: Places, shape: Shape) -> F32:
    """origin - what lies there, as a new vector."""
    out = memory.empty(shape.length)
    _difference(origin, places.starts, shape.rows, out)
    return out


def rebase(origin: F32, anchor: F32, q: Coded | None, places: Places, shape: Shape) -> None:
    """Changes what lies there to anchor - (origin - it - q). origin, anchor: float32 (length,)."""
    _rebase(origin, anchor, NO_FRAMES if q is None else q.starts, places.starts, shape.rows, shape.levels)


def load(places: Places, shape: Shape) -> F32:
    """What lies there, as a new vector."""
    out = np.empty(shape.length, np.float32)
    _load(places.starts, shape.rows, out)
    return out


def store(vector: F32, places: Places, shape: Shape) -> None:
    """Writes a vector there."""
    _store(vector, places.starts, shape.rows)


def _as_pointer(_typing: Any, _address: Any) -> Any:  # noqa: ANN401 - numba's own protocol
    """An int64 as an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_as_pointer)
_carray: Any = numba.carray  # type: ignore[attr-defined]


@kernel
def _at(address: int, length: int) -> Any:  # noqa: ANN401 - an array of numba's
    return _carray(_pointer(np.int64(address)), (length,), dtype=np.float32)


@kernel
def _difference(origin: F32, starts: I64, rows: I64, out: F32) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        given, local, result = origin[at : at + length], _at(starts[row], length), out[at : at + length]
        for i in range(length):
            result[i] = given[i] - local[i]


@kernel
def _load(starts: I64, rows: I64, out: F32) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        local, result = _at(starts[row], length), out[at : at + length]
        for i in range(length):
            result[i] = local[i]


@kernel
def _store(vector: F32, starts: I64, rows: I64) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        given, local = vector[at : at + length], _at(starts[row], length)
        for i in range(length):
            local[i] = given[i]


@kernel
def _rebase(origin: F32, anchor: F32, frames: I64, starts: I64, rows: I64, levels: int) -> None:
    for row in range(len(rows)):
        at, length = rows[row, 0], rows[row, 1]
        old, new, local = origin[at : at + length], anchor[at : at + length], _at(starts[row], length)
        if len(frames) == 0:
            for i in range(length):
                local[i] = new[i] - (old[i] - local[i])
        elif levels == 0:
            q = _at(frames[rows[row, 2]] + rows[row, 3], length)
            for i in range(length):
                local[i] = new[i] - (old[i] - local[i] - q[i])
        else:
            frame = frames[rows[row, 2]]
            blocks = (length + BLOCK - 1) // BLOCK
            scales = _carray(_pointer(frame + rows[row, 4]), (blocks,), dtype=np.uint16)
            size = length if levels == 127 else (length + 1) // 2
            codes = _carray(_pointer(frame + rows[row, 3]), (size,), dtype=np.uint8)
            _rebase_coded(old, new, codes, scales, levels, local)


@kernel
def _rebase_coded(old: F32, new: F32, codes: U8, scales: NDArray[np.uint16], levels: int, local: F32) -> None:
    scratch = np.empty(1, np.float32)
    scratch_bits = scratch.view(np.uint32)
    for block in range(len(scales)):
        start = block * BLOCK
        n = min(BLOCK, len(local) - start)
        scratch_bits[0] = np.uint32(scales[block]) << np.uint32(16)
        scale = scratch[0]
        if levels == 127:
            code, a, b, c = codes[start : start + n], old[start : start + n], new[start : start + n], local[start:]
            for i in range(len(code)):
                q = scale * np.float32(np.int32(np.int8(code[i])))
                c[i] = b[i] - (a[i] - c[i] - q)
        else:
            half = (n + 1) // 2
            code = codes[start // 2 : start // 2 + half]
            a, b, c = old[start : start + half], new[start : start + half], local[start : start + half]
            for i in range(len(code)):
                q = scale * np.float32(np.int32((np.int32(code[i] & 0xF) ^ 8) - 8))
                c[i] = b[i] - (a[i] - c[i] - q)
            a, b, c = old[start + half : start + n], new[start + half : start + n], local[start + half : start + n]
            for i in range(len(c)):
                q = scale * np.float32(np.int32((np.int32(code[i] >> 4) ^ 8) - 8))
                c[i] = b[i] - (a[i] - c[i] - q)


def warm_up() -> None:
    """Compiles the kernels, or loads them from disk, so that nothing compiles while a model trains."""
    shape = Shape(1, np.array([[0, 1, 0, 0, 4]], np.int64), ((0, 0),), 7)
    vector = np.ones(1, np.float32)
    places = Places.in_vector(vector, shape)
    difference(vector, places, shape)
    load(places, shape)
    store(vector.copy(), places, shape)
    rebase(vector.copy(), vector.copy(), Coded.of([np.zeros(8, np.uint8)]), places, shape)
