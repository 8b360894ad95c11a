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

from atoll_wire.spans import BLOCK

P = ParamSpec("P")
R = TypeVar("R")

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]
U8: TypeAlias = NDArray[np.uint8]
U16: TypeAlias = NDArray[np.uint16]

LANES = 64  # sums side by side: a single one would wait for each of its additions
MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: added and taken off again, it leaves the nearest integer, half to even
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
    scratch = np.empty(1, np.float32)
    scratch_bits = scratch.view(np.uint32)
    position, code_at, scale_at = 0, 0, 0
    for length in lengths:
        for start in range(position, position + length, BLOCK):
            n = min(BLOCK, position + length - start)
            values = vector[start : start + n]
            largest = _largest_bits(values.view(np.int32))
            if largest >= INFINITY_BITS:
                return NOT_FINITE
            scale = _scale_bits(np.uint32(largest), np.float32(levels), scratch)
            scales[scale_at] = np.uint16(scale >> np.uint32(16))
            scratch_bits[0] = scale
            inverse = np.float32(1.0) / scratch[0] if scale else np.float32(0.0)
            if levels == 127:
                _code_bytes(values, inverse, codes[code_at : code_at + n])
                code_at += n
            else:
                half = (n + 1) // 2
                _code_pairs(values[:half], values[half:], inverse, codes[code_at : code_at + half])
                code_at += half
            scale_at += 1
        position += length
    return SOUND


@kernel
def _largest_bits(bits: NDArray[np.int32]) -> Any:  # noqa: ANN401 - an integer of numba's
    """Of the magnitudes; as integers: a maximum that vectorises, and that sees NaN and infinity."""
    largest = np.int32(0)
    for i in range(len(bits)):
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return largest


@kernel
def _code(value: np.float32, inverse: np.float32, most: np.int32) -> Any:  # noqa: ANN401 - an integer of numba's
    """The nearest code, half to even, within -most..most."""
    nearest = np.int32((value * inverse + MAGIC) - MAGIC)
    return min(max(nearest, np.int32(-most)), most)


@kernel
def _code_bytes(values: F32, inverse: np.float32, codes: U8) -> None:
    """A block's codes, one to a byte."""
    for i in range(len(codes)):
        codes[i] = np.uint8(_code(values[i], inverse, np.int32(127)) & np.int32(0xFF))


@kernel
def _code_pairs(low: F32, high: F32, inverse: np.float32, codes: U8) -> None:
    """A block's codes, two to a byte. high: as long as low, or one shorter: its last code is then zero."""
    for i in range(len(high)):
        first, second = _code(low[i], inverse, np.int32(7)), _code(high[i], inverse, np.int32(7))
        codes[i] = np.uint8((first & np.int32(0xF)) | ((second & np.int32(0xF)) << np.int32(4)))
    for i in range(len(high), len(low)):
        codes[i] = np.uint8(_code(low[i], inverse, np.int32(7)) & np.int32(0xF))


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
def accumulate(codes: U8, scales: U16, lengths: I64, levels: int, factors: F32, fresh: bool, out: F32) -> None:
    """out += factor of the segment x scale x code; what was in it counts for nothing when it is fresh.

    With a factor of one each sum has a single rounding.
    """
    scratch = np.empty(1, np.float32)
    scratch_bits = scratch.view(np.uint32)
    position, code_at, scale_at = 0, 0, 0
    for segment in range(len(lengths)):
        stop = position + lengths[segment]
        for start in range(position, stop, BLOCK):
            n = min(BLOCK, stop - start)
            scratch_bits[0] = np.uint32(scales[scale_at]) << np.uint32(16)
            scale = scratch[0] * factors[segment]
            if fresh:
                out[start : start + n] = np.float32(0.0)
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
def advance(base: F32, codes: U8, scales: U16, lengths: I64, levels: int, out: F32) -> None:
    """out = base + scale x code, each with a single rounding. base and out are apart: in place, `accumulate`."""
    scratch = np.empty(1, np.float32)
    scratch_bits = scratch.view(np.uint32)
    position, code_at, scale_at = 0, 0, 0
    for segment in range(len(lengths)):
        stop = position + lengths[segment]
        for start in range(position, stop, BLOCK):
            n = min(BLOCK, stop - start)
            scratch_bits[0] = np.uint32(scales[scale_at]) << np.uint32(16)
            scale = scratch[0]
            if levels == 127:
                old, new, block = base[start : start + n], out[start : start + n], codes[code_at : code_at + n]
                for i in range(len(new)):
                    new[i] = old[i] + scale * np.float32(np.int32(np.int8(block[i])))
                code_at += n
            else:
                half = (n + 1) // 2
                block = codes[code_at : code_at + half]
                old, new = base[start : start + half], out[start : start + half]
                for i in range(len(new)):
                    new[i] = old[i] + scale * np.float32(np.int32((np.int32(block[i] & 0xF) ^ 8) - 8))
                old, new = base[start + half : start + n], out[start + half : start + n]
                for i in range(len(new)):
                    new[i] = old[i] + scale * np.float32(np.int32((np.int32(block[i] >> 4) ^ 8) - 8))
                code_at += half
            scale_at += 1
        position = stop


@kernel
def accumulate_float32(values: F32, lengths: I64, factors: F32, fresh: bool, out: F32) -> None:
    """out += factor of the segment x value; what was in it counts for nothing when it is fresh."""
    position = 0
    for segment in range(len(lengths)):
        factor = factors[segment]
        given, sums = values[position : position + lengths[segment]], out[position : position + lengths[segment]]
        if fresh:
            sums[:] = np.float32(0.0)
        for i in range(len(given)):
            sums[i] += factor * given[i]
        position += lengths[segment]


@kernel
def squares_by_segment(values: F32, lengths: I64, squares: F64) -> int:
    """Sums of squares in float64, in a fixed order; NOT_FINITE when one is not finite."""
    position = 0
    for segment in range(len(lengths)):
        squares[segment] = _square(values[position : position + lengths[segment]])
        if not np.isfinite(squares[segment]):
            return NOT_FINITE
        position += lengths[segment]
    return SOUND


@kernel
def _square(values: F32) -> float:
    """Sum of squares in float64: LANES sums by place, then theirs in order."""
    sums = np.zeros(LANES, np.float64)
    whole = len(values) // LANES * LANES
    for start in range(0, whole, LANES):
        part = values[start : start + LANES]
        for i in range(LANES):
            sums[i] += np.float64(part[i]) * np.float64(part[i])
    for i in range(whole, len(values)):
        sums[i - whole] += np.float64(values[i]) * np.float64(values[i])
    total = 0.0
    for i in range(LANES):
        total += sums[i]
    return total
