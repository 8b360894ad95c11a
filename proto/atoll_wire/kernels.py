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
    magnitude, shifted, scratch = vector.view(np.int32), np.empty(BLOCK, np.float32), np.empty(1, np.float32)
    rounded, scratch_bits = shifted.view(np.int32), scratch.view(np.uint32)
    position, code_at, scale_at = 0, 0, 0
    for length in lengths:
        for start in range(position, position + length, BLOCK):
            n = min(BLOCK, position + length - start)
            # As integers: a maximum that vectorises, and that sees NaN and infinity.
            largest, raw = np.int32(0), magnitude[start : start + n]
            for i in range(len(raw)):
                largest = max(largest, np.int32(raw[i] & np.int32(0x7FFFFFFF)))
            if largest >= INFINITY_BITS:
                return NOT_FINITE
            scale = _scale_bits(np.uint32(largest), np.float32(levels), scratch)
            scales[scale_at] = np.uint16(scale >> np.uint32(16))
            scratch_bits[0] = scale
            inverse = np.float32(1.0) / scratch[0] if scale else np.float32(0.0)
            values = vector[start : start + n]
            for i in range(len(values)):
                shifted[i] = values[i] * inverse + MAGIC
            code_at += _pack(rounded, n, levels, codes[code_at:])
            scale_at += 1
        position += length
    return SOUND


@kernel
def _pack(rounded: NDArray[np.int32], n: int, levels: int, codes: U8) -> int:
    """Writes a block's codes as bytes, or two to a byte; returns how many bytes. rounded: bits of value + MAGIC."""
    most, least = np.int32(levels), np.int32(-levels)
    if levels == 127:
        whole = codes[:n]
        for i in range(len(whole)):
            whole[i] = np.uint8(min(max(np.int32(rounded[i] - MAGIC_BITS), least), most) & 0xFF)
        return n
    half = (n + 1) // 2
    if n % 2:
        rounded[n] = MAGIC_BITS
    packed, high = codes[:half], rounded[half : 2 * half]
    for i in range(len(packed)):
        first = min(max(np.int32(rounded[i] - MAGIC_BITS), least), most)
        second = min(max(np.int32(high[i] - MAGIC_BITS), least), most)
        packed[i] = np.uint8((np.int32(first) & 0xF) | ((np.int32(second) & 0xF) << 4))
    return half


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
            size = n if levels == 127 else (n + 1) // 2
            block = codes[code_at : code_at + size]
            square = _square_of_bytes(block) if levels == 127 else _square_of_pairs(block, n)
            if square < 0:
                return BAD_CODE
            total += np.float64(square) * (np.float64(scratch[0]) * np.float64(scratch[0]))
            code_at += size
            scale_at += 1
        squares[segment] = total
    return SOUND


@kernel
def _square_of_bytes(block: U8) -> int:
    """Sum of squares of a block's codes, one to a byte; -1 when one is out of range."""
    square, lowest = np.int32(0), np.int32(0)
    for i in range(len(block)):
        code = np.int32(np.int8(block[i]))
        lowest = min(lowest, code)
        square += np.int32(code * code)
    return -1 if lowest == -128 else int(square)


@kernel
def _square_of_pairs(block: U8, n: int) -> int:
    """Sum of squares of a block's n codes, two to a byte; -1 when one is out of range or padding is not zero."""
    square, lowest = np.int32(0), np.int32(0)
    for i in range(len(block)):
        low = np.int32((np.int32(block[i] & 0xF) ^ 8) - 8)
        high = np.int32((np.int32(block[i] >> 4) ^ 8) - 8)
        lowest = min(lowest, low, high)
        square += np.int32(low * low + high * high)
    padded = n % 2 == 1 and block[len(block) - 1] >> 4 != 0
    return -1 if lowest == -8 or padded else int(square)


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
            # Slices of known length and codes narrowed to 32 bits: without them these loops do not vectorise.
            if levels == 127:
                whole, block = out[start : start + n], codes[code_at : code_at + n]
                for i in range(len(whole)):
                    whole[i] += scale * np.float32(np.int32(np.int8(block[i])))
                code_at += n
            else:
                half = (n + 1) // 2
                block, low, high = (
                    codes[code_at : code_at + half],
                    out[start : start + half],
                    out[start + half : start + n],
                )
                for i in range(len(low)):
                    low[i] += scale * np.float32(np.int32((np.int32(block[i] & 0xF) ^ 8) - 8))
                for i in range(len(high)):
                    high[i] += scale * np.float32(np.int32((np.int32(block[i] >> 4) ^ 8) - 8))
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
