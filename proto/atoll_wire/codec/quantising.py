"""Quantises blocks of values: chooses a block's scale and computes its codes.

int8: the scale is the largest magnitude divided by 127, rounded up, so that no value is clipped.

int4 has too few codes for that rule, because most values of a block are much smaller than the largest. An entropy coder
works best if the quantisation step is proportional to the values' root mean square s. At high rates, a uniform step
loses 0.25 bits per value vs. the rate-distortion bound (Gish and Pierce, 1968, DOI 10.1109/TIT.1968.1054193).
`benchmarks.data_plane.kernels` measures the distance to the bound. The scale is 0.48 x s, but at least an eighth of the
largest value, to limit clipping. Values are multiplied by 0.98 before rounding, because the mean of the values that
share a code is below the code. Smaller codes also compress better.

A learner's clipping and rounding errors stay in its outstanding work (see `atoll.fragments.adoption`). The core's
errors become part of the next published update.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll_wire.codec.block_kernels import (
    F32,
    INFINITY_BITS,
    LARGEST,
    SMALLEST_NORMAL_BITS,
    U8,
    bits_of,
    float_of,
    kernel,
)

STEP = np.float32(0.48)  # scale of a block, as a multiple of the root mean square
EDGE = np.float32(0.125)  # smallest scale, as a multiple of the largest value; 7 x scale is at least 0.85 of that value
SMALLER = np.float32(0.98)  # factor by which values are multiplied before rounding
FINENESS = np.float32(1023.0)  # the largest integer that is squared: 512 squares fit in an int32
SMALLEST = np.float32(2.0**-115)  # int4 blocks below this magnitude are coded as zero, to avoid overflow
KEPT, HALF = np.uint32(0xFFF80000), np.uint32(0x00040000)  # rounds a scale to 5 significant bits, which compress well
MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, half to even


@kernel
def encode_block(values: F32, levels: int, codes: U8) -> int:
    """Writes a block's codes. Returns the bits of its scale as bfloat16, or -1 if a value is not finite.

    levels: 7 or 127. codes: see `block_kernels`.
    """
    bits = np.uint32(_largest_bits(values.view(np.int32)))
    if bits >= INFINITY_BITS:
        return -1
    largest = float_of(bits)
    scale = _up(largest / np.float32(127.0)) if levels == 127 else _near(_step(values, largest))
    if scale < SMALLEST_NORMAL_BITS:
        codes[:] = np.uint8(0)
        return 0
    if levels == 127:
        _code_bytes(values, np.float32(1.0) / float_of(scale), codes)
    else:
        inverse = SMALLER / float_of(scale)
        if largest * inverse > np.float32(7.0):
            _cut_pairs(values[: len(codes)], values[len(codes) :], inverse, codes)
        else:
            _code_pairs(values[: len(codes)], values[len(codes) :], inverse, codes)
    return int(scale >> np.uint32(16))


@kernel
def _largest_bits(bits: NDArray[np.int32]) -> Any:  # noqa: ANN401 - an integer of numba's
    """Returns the bits of the largest magnitude. The loop over integers vectorises and detects NaN and infinity."""
    largest = np.int32(0)
    for i in range(len(bits)):
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return largest


@kernel
def _step(values: F32, largest: np.float32) -> Any:  # noqa: ANN401 - a float32 of numba's
    """Returns the unrounded scale of an int4 block. Integer sums may be reordered, so the loop vectorises."""
    if largest < SMALLEST:
        return np.float32(0.0)
    square, inverse = np.int32(0), FINENESS / largest
    for i in range(len(values)):
        fine = np.int32(values[i] * inverse)
        square = np.int32(square + fine * fine)
    rms = np.sqrt(np.float32(square) / np.float32(len(values))) / FINENESS
    return largest * max(STEP * rms, EDGE)


@kernel
def _up(scale: np.float32) -> Any:  # noqa: ANN401 - an integer of numba's
    """Returns the bits of a scale rounded up to bfloat16, or rounded down if 127 times the scale would overflow."""
    bits = bits_of(scale)
    above = (bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return bits & np.uint32(0xFFFF0000) if float_of(above) > LARGEST / np.float32(127.0) else above


@kernel
def _near(scale: np.float32) -> Any:  # noqa: ANN401 - an integer of numba's
    """Returns the bits of a scale rounded to 5 significant bits, such that 7 times the scale does not overflow."""
    bits = bits_of(min(scale, LARGEST / np.float32(7.0)))
    near = (bits + HALF) & KEPT
    return bits & KEPT if float_of(near) > LARGEST / np.float32(7.0) else near


@kernel
def _code_bytes(values: F32, inverse: np.float32, codes: U8) -> None:
    """Writes int8 codes. Clips them, because a scale that was rounded down could give codes of 128."""
    for i in range(len(codes)):
        nearest = np.int32((values[i] * inverse + MAGIC) - MAGIC)
        codes[i] = np.uint8(min(max(nearest, np.int32(-127)), np.int32(127)) & np.int32(0xFF))


@kernel
def _nibble(value: np.float32) -> Any:  # noqa: ANN401 - an integer of numba's
    """Returns the 4-bit code of a scaled value. Adding MAGIC puts the nearest integer in a float32's last bits."""
    return bits_of(value + MAGIC) & np.uint32(0xF)


@kernel
def _cut(value: np.float32) -> Any:  # noqa: ANN401 - a float32 of numba's
    return min(max(value, np.float32(-7.0)), np.float32(7.0))


@kernel
def _code_pairs(low: F32, high: F32, inverse: np.float32, codes: U8) -> None:
    """Writes int4 codes, two per byte. If `high` is one value shorter than `low`, the last high code is zero."""
    for i in range(len(high)):
        codes[i] = np.uint8(_nibble(low[i] * inverse) | (_nibble(high[i] * inverse) << np.uint32(4)))
    for i in range(len(high), len(low)):
        codes[i] = np.uint8(_nibble(low[i] * inverse))


@kernel
def _cut_pairs(low: F32, high: F32, inverse: np.float32, codes: U8) -> None:
    """Writes int4 codes like `_code_pairs`, but clips values that exceed the largest code."""
    for i in range(len(high)):
        codes[i] = np.uint8(_nibble(_cut(low[i] * inverse)) | (_nibble(_cut(high[i] * inverse)) << np.uint32(4)))
    for i in range(len(high), len(low)):
        codes[i] = np.uint8(_nibble(_cut(low[i] * inverse)))
