"""A slow, simple implementation of the codec in NumPy, to which the kernels must be bit-identical."""

from __future__ import annotations

import numpy as np
from atoll_wire.codec.frame_codec import LEVELS
from atoll_wire.layout.frame_spans import BLOCK, Codec, FrameSpan

F32 = np.float32


def scale_of(block: np.ndarray, levels: int) -> np.float32:
    """Returns the block's scale, or zero if it is subnormal (see `quantising`)."""
    largest = F32(np.abs(block).max())
    if levels == 127:
        exact, rounding, kept = largest / F32(127), 0xFFFF, 0xFFFF0000
    else:
        exact, rounding, kept = F32(0), 0x40000, 0xFFF80000
        if largest >= F32(2.0**-115):
            fine = (block * (F32(1023) / largest)).astype(np.int32)
            rms = np.sqrt(F32((fine * fine).sum()) / F32(len(block))) / F32(1023)
            exact = min(largest * max(F32(0.48) * rms, F32(0.125)), np.finfo(F32).max / F32(7))
    bits = int(F32(exact).view(np.uint32))
    rounded = np.uint32((bits + rounding) & kept).view(F32)
    if rounded > np.finfo(F32).max / F32(levels):
        rounded = np.uint32(bits & kept).view(F32)
    return rounded if rounded >= np.finfo(F32).tiny else F32(0)


def blocks(span: FrameSpan) -> list[slice]:
    """Returns the slices of the frame's blocks. Each segment starts a new block."""
    places, position = [], 0
    for segment in span.segments:
        places += [
            slice(position + start, position + min(start + BLOCK, segment.length))
            for start in range(0, segment.length, BLOCK)
        ]
        position += segment.length
    return places


def quantise(values: np.ndarray, span: FrameSpan, codec: Codec) -> tuple[list[np.ndarray], list[np.float32]]:
    """Returns integer codes and scales, block by block."""
    levels, codes, scales = LEVELS[codec], [], []
    for place in blocks(span):
        scale = scale_of(values[place], levels)
        inverse = F32(1 if levels == 127 else 0.98) / scale if scale else F32(0)
        rounded = np.rint((values[place] * inverse).astype(F32))
        codes.append(np.clip(rounded, -levels, levels).astype(np.int32))
        scales.append(scale)
    return codes, scales


def content(values: np.ndarray, span: FrameSpan, codec: Codec) -> bytes:
    """Returns a frame's content before compression."""
    codes, scales = quantise(values, span, codec)
    packed = b""
    for block in codes:
        if codec is Codec.INT8:
            packed += block.astype(np.int8).tobytes()
        else:
            half = (len(block) + 1) // 2
            padded = np.zeros(2 * half, np.int32)
            padded[: len(block)] = block
            packed += ((padded[:half] & 0xF) | ((padded[half:] & 0xF) << 4)).astype(np.uint8).tobytes()
    return packed + b"".join((scale.view(np.uint32) >> 16).astype("<u2").tobytes() for scale in scales)


def decoded(values: np.ndarray, span: FrameSpan, codec: Codec) -> np.ndarray:
    """Returns the decoded values."""
    codes, scales = quantise(values, span, codec)
    return np.concatenate([scale * block.astype(F32) for block, scale in zip(codes, scales, strict=True)])
