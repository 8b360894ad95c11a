"""PURE: the inner loops of a merge. A kernel processes one frame of all contributions, in blocks that fit in the cache.

The kernels share these arguments:
- contents: memory addresses of the frame's contents, int64 (contributions,). All contents use one codec.
- scales_from: byte offset of the scales in each content.
- levels: number of levels of the codec; 0 for float32.
- lengths: number of values in each segment, int64 (segments,).
- factors: float32 (contributions, segments).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from atoll_wire.codec.block_kernels import (
    F32,
    F64,
    LANES,
    add_block,
    add_squares,
    advance_block,
    bytes_at,
    coded_bytes,
    floats_at,
    kernel,
    scale_of,
    scales_at,
    total,
)
from atoll_wire.codec.quantising import encode_block
from atoll_wire.layout.frame_spans import BLOCK
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]


@kernel
def _combine(
    contents: I64, scales_from: int, levels: int, code_at: int, number: int, factors: F32, segment: int, block: F32
) -> None:
    """Writes the sum of factor x decoded values over all contributions to `block`.

    code_at: byte offset of the block's codes in each content. number: index of the block in the frame.
    """
    block[:] = np.float32(0.0)
    for given in range(len(contents)):
        factor = factors[given, segment]
        if levels == 0:
            values = floats_at(contents[given] + code_at, len(block))
            for i in range(len(block)):
                block[i] += factor * values[i]
        else:
            codes = bytes_at(contents[given] + code_at, coded_bytes(len(block), levels))
            scale = scale_of(scales_at(contents[given] + scales_from, number + 1)[number])
            add_block(codes, scale * factor, levels, block)


@kernel
def frame_squares(contents: I64, scales_from: int, levels: int, lengths: I64, factors: F32, squares: F64) -> None:
    """Writes the squared norm of the weighted sum of contributions to `squares`, float64 (segments,)."""
    block, sums = np.empty(BLOCK, np.float32), np.empty(LANES, np.float64)
    code_at, number = 0, 0
    for segment in range(len(lengths)):
        sums[:] = 0.0
        for start in range(0, lengths[segment], BLOCK):
            part = block[: min(BLOCK, lengths[segment] - start)]
            _combine(contents, scales_from, levels, code_at, number, factors, segment, part)
            add_squares(part, sums)
            code_at += coded_bytes(len(part), levels)
            number += 1
        squares[segment] = total(sums)


@kernel
def frame_step(
    contents: I64,
    scales_from: int,
    levels: int,
    lengths: I64,
    factors: F32,
    scales: F32,
    rates: F32,
    theta: F32,
    momentum: F32,
    theta_pub: F32,
    published: F32,
    update: I64,
    update_scales_from: int,
    update_levels: int,
) -> bool:
    """Takes the Nesterov step on a frame, in place. Returns False if a value is not finite.

        Delta = scale x (weighted sum of contributions)
        momentum' = decay x momentum + Delta
        theta' = theta - lr x (Delta + push x momentum')

    scales: float32 (segments,). rates: the values lr, decay and push, float32 (3,). update: address of the content that
    receives Q(theta' - theta_pub), where Q is the rounding by the update's codec. published: receives theta_pub + Q.
    """
    block = np.empty(BLOCK, np.float32)
    at = 0
    code_at = 0
    number = 0
    update_at = 0
    for segment in range(len(lengths)):
        end = at + lengths[segment]
        for start in range(at, end, BLOCK):
            stop = min(start + BLOCK, end)
            part = block[: stop - start]
            old = theta_pub[start:stop]
            new = published[start:stop]
            _combine(contents, scales_from, levels, code_at, number, factors, segment, part)
            _nesterov(part, scales[segment], rates, theta[start:stop], momentum[start:stop], old)
            size = coded_bytes(stop - start, update_levels)
            if update_levels == 0:
                floats_at(update[0] + update_at, stop - start)[:] = part
                for i in range(len(part)):
                    new[i] = old[i] + part[i]
            else:
                codes = bytes_at(update[0] + update_at, size)
                bits = encode_block(part, update_levels, codes)
                if bits < 0:
                    return False
                scales_at(update[0] + update_scales_from, number + 1)[number] = bits
                if old.ctypes.data == new.ctypes.data:  # the compiler would not vectorise a loop over aliased arrays
                    add_block(codes, scale_of(np.uint16(bits)), update_levels, new)
                else:
                    advance_block(old, codes, scale_of(np.uint16(bits)), update_levels, new)
            code_at += coded_bytes(stop - start, levels)
            update_at += size
            number += 1
        at = end
    return True


@kernel
def _nesterov(
    combined: F32,
    scale: np.float32,
    rates: F32,
    theta: F32,
    momentum: F32,
    theta_pub: F32,
) -> None:
    """Takes the Nesterov step on one block, in place.

    combined: the weighted sum of contributions. It is overwritten with theta' - theta_pub, which the update then
    encodes.
    """
    lr = rates[0]
    decay = rates[1]
    push = rates[2]
    for i in range(len(combined)):
        delta = scale * combined[i]
        moved = decay * momentum[i] + delta
        momentum[i] = moved
        stepped = theta[i] - lr * (delta + push * moved)
        theta[i] = stepped
        combined[i] = stepped - theta_pub[i]
