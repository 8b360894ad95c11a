"""Invalid payloads of frames, for the codec, the core's intake, and a learner."""

from __future__ import annotations

import random

import numpy as np
import zstandard
from atoll_wire.codec import frame_codec
from atoll_wire.layout.frame_spans import BLOCK, Codec, FrameSpan

from tests.fuzz.mutate import mutate_bytes

MAGIC = (0xFD2FB528).to_bytes(4, "little")
MAX_BLOCK = 1 << 17  # bytes of content in one zstd block
EVIL_SCALES = (0x7F80, 0x7FC0, 0xFF80, 0x8000, 0xBF80, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7E80)  # scales are bfloat16


def unsound(rng: random.Random, payload: bytes, span: FrameSpan, kind: Codec) -> bytes:
    """Changes a valid payload of either form: after or before compression, or with a false header."""
    expected = frame_codec.content_bytes(span, kind)
    if rng.random() < 0.5:
        payload = stored(payload)
    match rng.randrange(8):
        case 0:
            return mutate_bytes(rng, payload)
        case 1:  # a bomb: much content from few bytes, with or without its declared size
            size = rng.choice((0, 1, expected, expected + 1, 1 << 20, 1 << 24))
            return zstandard.ZstdCompressor(level=1, write_content_size=rng.random() < 0.5).compress(bytes(size))
        case 2:
            return payload + rng.choice((payload, b"", rng.randbytes(8)))
        case 3:
            return forged(rng, expected)
        case 4:
            return _packed(rng, _scaled(rng, zstandard.decompress(payload), span, kind))
        case _:
            return _packed(rng, mutate_bytes(rng, zstandard.decompress(payload)))


def stored(payload: bytes) -> bytes:
    """Returns the uncompressed form of a valid payload."""
    return frame_codec.store(np.frombuffer(zstandard.decompress(payload), np.uint8))


def _packed(rng: random.Random, content: bytes) -> bytes:
    return frame_codec.pack(np.frombuffer(content, np.uint8), compressed=rng.random() < 0.5)


def forged(rng: random.Random, expected: int) -> bytes:
    """Returns a payload that declares the expected size, but may expand to another, with four bytes per block."""
    blocks, left = [], rng.choice((expected, expected, expected - 1, expected + 1, 1 << 20, 1 << 28))
    while left > 0:
        size = min(left, rng.choice((MAX_BLOCK, MAX_BLOCK, expected, 1)) if left < 1 << 20 else MAX_BLOCK)
        left -= size
        head = ((left == 0) | 1 << 1 | size << 3).to_bytes(3, "little")
        blocks.append(head + bytes([rng.choice((0, 1, 0x77, 0x88))]))
    return MAGIC + b"\xa0" + expected.to_bytes(4, "little") + b"".join(blocks)


def _scaled(rng: random.Random, content: bytes, span: FrameSpan, kind: Codec) -> bytes:
    """Returns the content with one invalid scale or value."""
    if kind is Codec.FLOAT32:
        values = np.frombuffer(content, "<f4").copy()
        values[rng.randrange(len(values))] = rng.choice((np.nan, np.inf, -np.inf, 3e38, 1e-45, -0.0))
        return values.tobytes()
    changed, scales = bytearray(content), sum(-(-segment.length // BLOCK) for segment in span.segments)
    at = len(content) - 2 * (1 + rng.randrange(scales))
    changed[at : at + 2] = rng.choice(EVIL_SCALES).to_bytes(2, "little")
    return bytes(changed)
