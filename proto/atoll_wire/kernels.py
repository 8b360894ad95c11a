"""The inner loops: one pass over memory, no temporaries larger than a block, the GIL released, no fastmath.

Every kernel works on the flat data of one frame: `lengths` are its segments, in order; blocks of 256 start anew in
each segment; codes of all blocks come first on the wire, scales (bfloat16 bits) after them.

A code is at most 7 or 127 and a scale has 8 significant bits, so scale x code is exact in float32: adding it to an
anchor rounds once, with or without a fused multiply-add, on any machine. That is why anchors are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from atoll_wire.layout import BLOCK

P = ParamSpec("P")
R = TypeVar("R")

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]
U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]

HALF = BLOCK // 2
MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer, half to even, in the low bits
MAGIC_BITS = np.int32(0x4B400000)
INFINITY_BITS = np.uint32(0x7F800000)
SMALLEST_NORMAL_BITS = np.uint32(0x00800000)
LARGEST = np.float32(np.finfo(np.float32).max)

SOUND, NOT_FINITE, BAD_SCALE, BAD_CODE = 0, 1, 2, 3


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles on first use, kept on disk; see `codec.warm_up`."""
    return cast("Callable[P, R]", numba.njit(nogil=True, cache=True, error_model="numpy")(function))


@kernel
def _scale_bits(largest_bits: np.uint32, levels: np.float32, scratch: F32) -> Any:  # noqa: ANN401 - an integer of numba's
    """Bits of the scale for a block whose largest magnitude is given: levels x scale >= largest, where it can be."""
    bits = scratch.view(np.uint32)
    bits[0] = largest_bits
    scratch[0] = scratch[0] / levels
    if bits[0] < SMALLEST_NORMAL_BITS:
        return np.uint32(0)
    truncated = bits[0] & np.uint32(0xFFFF0000)
    bits[0] = (bits[0] + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    if scratch[0] > LARGEST / levels:
        return truncated
    return bits[0]


@kernel
def quantise(vector: F32, lengths: I64, levels: int, codes: U8, scales: U16) -> int:
    """Codes and scales of a frame's values. levels: 7 (two codes a byte) or 127. Returns SOUND or NOT_FINITE.

    In a block of n values packed by two, byte i holds value i in its low and value i + (n + 1) // 2 in its high half.
    """
    magnitude, shifted, scratch = vector.view(np.uint32), np.empty(BLOCK, np.float32), np.empty(1, np.float32)
    shifted_bits, scratch_bits = shifted.view(np.int32), scratch.view(np.uint32)
    position, code_at, scale_at = 0, 0, 0
    for length in lengths:
        for start in range(position, position + length, BLOCK):
            n = min(BLOCK, position + length - start)
            values = vector[start : start + n]
            largest = np.uint32(0)
            for raw in magnitude[
                start : start + n
            ]:  # as integers: a maximum that vectorises, and sees NaN and infinity
                largest = max(largest, raw & np.uint32(0x7FFFFFFF))
            if largest >= INFINITY_BITS:
                return NOT_FINITE
            scale = _scale_bits(largest, np.float32(levels), scratch)
            scales[scale_at] = np.uint16(scale >> np.uint32(16))
            scratch_bits[0] = scale
            inverse = np.float32(1.0) / scratch[0] if scale else np.float32(0.0)
            for i in range(n):
                shifted[i] = values[i] * inverse + MAGIC
            for i in range(n):
                shifted_bits[i] = min(max(shifted_bits[i] - MAGIC_BITS, np.int32(-levels)), np.int32(levels))
            if levels == 127:
                for i in range(n):
                    codes[code_at + i] = np.uint8(shifted_bits[i] & 0xFF)
                code_at += n
            else:
                half = (n + 1) // 2
                if n % 2:
                    shifted_bits[n] = 0
                for i in range(half):
                    codes[code_at + i] = np.uint8((shifted_bits[i] & 0xF) | ((shifted_bits[half + i] & 0xF) << 4))
                code_at += half
            scale_at += 1
        position += length
    return SOUND


@kernel
def inspect(codes: U8, scales: U16, lengths: I64, levels: int, squares: F64) -> int:
    """Sums of squares per segment of a coded frame, in float64; or what is wrong with it."""
    scratch = np.empty(1, np.float32)
    scratch_bits = scratch.view(np.uint32)
    code_at, scale_at = 0, 0
    for segment in range(len(lengths)):
        total = 0.0
        for start in range(0, lengths[segment], BLOCK):
            n = min(BLOCK, lengths[segment] - start)
            scratch_bits[0] = np.uint32(scales[scale_at]) << np.uint32(16)
            if scales[scale_at] != 0 and (scratch_bits[0] < SMALLEST_NORMAL_BITS or scratch_bits[0] >= INFINITY_BITS):
                return BAD_SCALE  # subnormal, infinite, NaN, or negative
            if scratch[0] > LARGEST / np.float32(levels):
                return BAD_SCALE
            square, forbidden = np.int64(0), 0
            if levels == 127:
                for i in range(n):
                    code = np.int32(np.int8(codes[code_at + i]))
                    forbidden |= code == -128
                    square += code * code
                code_at += n
            else:
                half = (n + 1) // 2
                for i in range(half):
                    low = (np.int32(codes[code_at + i] & np.uint8(0xF)) ^ 8) - 8
                    high = (np.int32(codes[code_at + i] >> np.uint8(4)) ^ 8) - 8
                    forbidden |= (low == -8) | (high == -8)
                    square += low * low + high * high
                if n % 2:
                    forbidden |= (codes[code_at + half - 1] >> np.uint8(4)) != 0
                code_at += half
            if forbidden:
                return BAD_CODE
            total += np.float64(square) * (np.float64(scratch[0]) * np.float64(scratch[0]))
            scale_at += 1
        squares[segment] = total
    return SOUND


@kernel
def accumulate(codes: U8, scales: U16, lengths: I64, levels: int, factors: F32, out: F32) -> None:
    """out += factor of the segment x scale x code. With a factor of one each sum has a single rounding."""
    scratch = np.empty(1, np.float32)
    scratch_bits = scratch.view(np.uint32)
    position, code_at, scale_at = 0, 0, 0
    for segment in range(len(lengths)):
        stop = position + lengths[segment]
        for start in range(position, stop, BLOCK):
            n = min(BLOCK, stop - start)
            scratch_bits[0] = np.uint32(scales[scale_at]) << np.uint32(16)
            scale = scratch[0] * factors[segment]
            if levels == 127:
                for i in range(n):
                    out[start + i] += scale * np.float32(np.int8(codes[code_at + i]))
                code_at += n
            else:
                half = (n + 1) // 2
                for i in range(half):
                    out[start + i] += scale * np.float32((np.int32(codes[code_at + i] & np.uint8(0xF)) ^ 8) - 8)
                for i in range(n - half):
                    out[start + half + i] += scale * np.float32((np.int32(codes[code_at + i] >> np.uint8(4)) ^ 8) - 8)
                code_at += half
            scale_at += 1
        position = stop


@kernel
def accumulate_float32(values: F32, lengths: I64, factors: F32, out: F32) -> None:
    """out += factor of the segment x value."""
    position = 0
    for segment in range(len(lengths)):
        factor = factors[segment]
        for i in range(position, position + lengths[segment]):
            out[i] += factor * values[i]
        position += lengths[segment]


@kernel
def squares_by_segment(values: F32, lengths: I64, squares: F64) -> int:
    """Sums of squares in float64, element by element in order; NOT_FINITE when one is not finite."""
    position = 0
    for segment in range(len(lengths)):
        total = 0.0
        for i in range(position, position + lengths[segment]):
            total += np.float64(values[i]) * np.float64(values[i])
        if not np.isfinite(total):
            return NOT_FINITE
        squares[segment] = total
        position += lengths[segment]
    return SOUND
