"""Kernels over whole frames. Each kernel makes one pass over memory, without temporaries larger than a block.

Every kernel works on the flat data of one frame. lengths: segment lengths in order; each segment begins a new block of
512 values. codes, scales: the codes and scales of all blocks; a scale is stored as the bits of a bfloat16.
levels: 7 or 127.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll_wire.codec.block_kernels import (
    F32,
    F64,
    INFINITY_BITS,
    LANES,
    LARGEST,
    SMALLEST_NORMAL_BITS,
    U8,
    add_block,
    add_squares,
    advance_block,
    coded_bytes,
    fetch_ahead,
    kernel,
    scale_of,
    square_of_codes,
    total,
)
from atoll_wire.codec.quantising import encode_block
from atoll_wire.layout.frame_spans import BLOCK

I64: TypeAlias = NDArray[np.int64]
U16: TypeAlias = NDArray[np.uint16]

SOUND = 0
NOT_FINITE = 1
BAD_SCALE = 2
BAD_CODE = 3


@kernel
def quantise(values: F32, lengths: I64, levels: int, codes: U8, scales: U16) -> int:
    """Writes the codes and scales of a frame's values. Returns SOUND or NOT_FINITE."""
    at = 0
    code_at = 0
    scale_at = 0
    for length in lengths:
        for start in range(at, at + length, BLOCK):
            n = min(BLOCK, at + length - start)
            size = coded_bytes(n, levels)
            fetch_ahead(values, start)
            scale = encode_block(values[start : start + n], levels, codes[code_at : code_at + size])
            if scale < 0:
                return NOT_FINITE
            scales[scale_at] = scale
            code_at += size
            scale_at += 1
        at += length
    return SOUND


@kernel
def inspect(codes: U8, scales: U16, lengths: I64, levels: int, squares: F64) -> int:
    """Writes the sum of squares per segment of a coded frame. Returns SOUND, BAD_SCALE or BAD_CODE.

    squares: float64 (segments,), written in place.
    """
    code_at, scale_at = 0, 0
    for segment in range(len(lengths)):
        found = 0.0
        for start in range(0, lengths[segment], BLOCK):
            n = min(BLOCK, lengths[segment] - start)
            size, bits = coded_bytes(n, levels), np.uint32(scales[scale_at]) << np.uint32(16)
            if bits != 0 and (bits < SMALLEST_NORMAL_BITS or bits >= INFINITY_BITS):
                return BAD_SCALE  # subnormal, infinite, NaN, or negative
            scale = scale_of(scales[scale_at])
            if scale > LARGEST / np.float32(levels):
                return BAD_SCALE
            square = square_of_codes(codes[code_at : code_at + size], levels, n)
            if square < 0:
                return BAD_CODE
            found += np.float64(square) * (np.float64(scale) * np.float64(scale))
            code_at += size
            scale_at += 1
        squares[segment] = found
    return SOUND


@kernel
def accumulate(codes: U8, scales: U16, lengths: I64, levels: int, factors: F32, out: F32) -> None:
    """out += segment's factor x scale x code, in place. With a factor of one, each sum has a single rounding."""
    at = 0
    code_at = 0
    scale_at = 0
    for segment in range(len(lengths)):
        stop = at + lengths[segment]
        for start in range(at, stop, BLOCK):
            n = min(BLOCK, stop - start)
            size = coded_bytes(n, levels)
            scale = scale_of(scales[scale_at]) * factors[segment]
            fetch_ahead(out, start)
            add_block(codes[code_at : code_at + size], scale, levels, out[start : start + n])
            code_at += size
            scale_at += 1
        at = stop


@kernel
def advance(base: F32, codes: U8, scales: U16, lengths: I64, levels: int, out: F32) -> None:
    """out = base + scale x code. Each sum has a single rounding. base and out must not overlap (see `accumulate`)."""
    at = 0
    code_at = 0
    scale_at = 0
    for length in lengths:
        for start in range(at, at + length, BLOCK):
            stop = min(start + BLOCK, at + length)
            size = coded_bytes(stop - start, levels)
            block = codes[code_at : code_at + size]
            fetch_ahead(base, start)
            fetch_ahead(out, start)
            advance_block(base[start:stop], block, scale_of(scales[scale_at]), levels, out[start:stop])
            code_at += size
            scale_at += 1
        at += length


@kernel
def squares_by_segment(values: F32, lengths: I64, squares: F64) -> int:
    """Writes the sum of squares per segment, summed in float64 in a fixed order. Returns SOUND or NOT_FINITE."""
    sums, at = np.empty(LANES, np.float64), 0
    for segment in range(len(lengths)):
        sums[:] = 0.0
        add_squares(values[at : at + lengths[segment]], sums)
        squares[segment] = total(sums)
        if not np.isfinite(squares[segment]):
            return NOT_FINITE
        at += lengths[segment]
    return SOUND
