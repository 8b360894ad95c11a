"""The codec once more in plain numpy, slow and obvious: what the kernels are held against, bit by bit."""

from __future__ import annotations

import numpy as np
from atoll_wire.codec import LEVELS, Codec
from atoll_wire.spans import BLOCK, FrameSpan

F32 = np.float32


def scale_of(block: np.ndarray, levels: int) -> np.float32:
    """The block's scale: its largest magnitude over the levels, rounded up to bfloat16; zero when that is subnormal."""
    scale = F32(np.abs(block).max()) / F32(levels)
    bits = int(scale.view(np.uint32))
    if bits < 0x00800000:
        return F32(0)
    up = np.uint32((bits + 0xFFFF) & 0xFFFF0000).view(F32)
    return np.uint32(bits & 0xFFFF0000).view(F32) if up > np.finfo(F32).max / F32(levels) else up


def blocks(span: FrameSpan) -> list[slice]:
    """Where the frame's blocks lie: anew from the start of each segment."""
    places, position = [], 0
    for segment in span.segments:
        places += [
            slice(position + start, position + min(start + BLOCK, segment.length))
            for start in range(0, segment.length, BLOCK)
        ]
        position += segment.length
    return places


def quantise(values: np.ndarray, span: FrameSpan, codec: Codec) -> tuple[list[np.ndarray], list[np.float32]]:
    """Integer codes and scales, block by block."""
    levels, codes, scales = LEVELS[codec], [], []
    for place in blocks(span):
        scale = scale_of(values[place], levels)
        inverse = F32(1) / scale if scale else F32(0)
        rounded = np.rint((values[place] * inverse).astype(F32))
        codes.append(np.clip(rounded, -levels, levels).astype(np.int32))
        scales.append(scale)
    return codes, scales


def content(values: np.ndarray, span: FrameSpan, codec: Codec) -> bytes:
    """A frame before compression."""
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
    """What a reader gets back."""
    codes, scales = quantise(values, span, codec)
    return np.concatenate([scale * block.astype(F32) for block, scale in zip(codes, scales, strict=True)])
