"""Encodes float32 vectors as frames and decodes them: quantised in blocks of 512 values, compressed with zstd.

A frame's payload is one zstd frame that declares its content size. On fast links, its blocks are not compressed. The
content is the packed codes of all blocks, then their scales as bfloat16, little-endian. With FLOAT32, the content
consists of the values themselves. All sizes follow from the layout, so data on the wire never determines how much
memory is allocated.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from atoll_wire.codec import frame_kernels
from atoll_wire.codec.checksums import Payload, crc32c
from atoll_wire.layout.frame_spans import BLOCK, Codec, FrameSpan, Segment

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
Content: TypeAlias = NDArray[np.uint8]  # uncompressed bytes of a frame: the codes, followed by the scales

ZSTD_LEVEL = 1
STORED = b"\x28\xb5\x2f\xfd\xa0"  # zstd's magic number, and a header: one segment, content size of 4 bytes
LARGEST_BLOCK = 128 << 10  # bytes; zstd's limit

LEVELS = {Codec.INT8: 127, Codec.INT4: 7, Codec.FLOAT32: 0}  # the largest code; 0 if values are not quantised


class CodecError(ValueError):
    """A value is not finite, so the frame cannot be encoded."""


class FrameError(ValueError):
    """The payload is not a valid frame of this span and codec."""


class NotFiniteError(FrameError):
    """The frame is well-formed, but a value or scale is invalid. Usually, the learner's training has diverged."""


# ------------------------------------------------------------------------------------------------- whole frames


def encode_frame(vector: F32, span: FrameSpan, codec: Codec, *, compressed: bool = True) -> bytes:
    """Encodes one frame of a fragment.

    vector: float32 (fragment.length,), contiguous. Returns the payload. Raises CodecError if a value is not finite.
    """
    return pack(quantise_frame(vector[span.place], span, codec), compressed=compressed)


def quantise_frame(values: F32, span: FrameSpan, codec: Codec) -> Content:
    """Returns the content of a frame before compression, in new memory.

    values: float32 (span.length,), contiguous. Raises CodecError if a value is not finite.
    """
    if codec is Codec.FLOAT32:
        squares = np.empty(len(span.segments), np.float64)
        if frame_kernels.squares_by_segment(values, lengths(span), squares) != frame_kernels.SOUND:
            raise CodecError(f"values of frame {span.index} are not finite")
        return values.astype("<f4").view(np.uint8)
    content = np.empty(content_bytes(span, codec), np.uint8)
    codes, scales = _parts(content, span, codec)
    if frame_kernels.quantise(values, lengths(span), LEVELS[codec], codes, scales) != frame_kernels.SOUND:
        raise CodecError(f"values of frame {span.index} are not finite")
    return content


def check_frame(payload: Payload, span: FrameSpan, codec: Codec) -> tuple[Content, F64]:
    """Returns a payload's content, and the sum of squares of its values per segment: float64 (len(span.segments),).

    Raises FrameError if no correct encoder could have made the payload.
    """
    content = decompress(payload, span, codec)
    squares = np.empty(len(span.segments), np.float64)
    if codec is Codec.FLOAT32:
        found = frame_kernels.squares_by_segment(content.view("<f4"), lengths(span), squares)
    else:
        found = frame_kernels.inspect(*_parts(content, span, codec), lengths(span), LEVELS[codec], squares)
    if found != frame_kernels.SOUND:
        wrong = {
            frame_kernels.NOT_FINITE: "has a value that is not finite",
            frame_kernels.BAD_SCALE: "has a scale that is NaN, infinite, negative, subnormal or too large",
            frame_kernels.BAD_CODE: "has a code that is out of range",
        }
        raise (FrameError if found == frame_kernels.BAD_CODE else NotFiniteError)(wrong[found])
    return content, squares


def decode_frame(payload: Payload, span: FrameSpan, codec: Codec, out: F32) -> None:
    """Writes a frame's values to the frame's place in `out`, float32 (fragment.length,).

    Raises FrameError if the payload is not valid.
    """
    content = decompress(payload, span, codec)
    target = out[span.place]
    if codec is Codec.FLOAT32:
        target[:] = content.view("<f4")  # bit for bit, including the sign of zero
    else:
        target[:] = 0.0
        content_add(content, span, codec, np.ones(len(span.segments), np.float32), out)


def decode_add(payload: Payload, span: FrameSpan, codec: Codec, factors: F32, out: F32) -> None:
    """Multiplies each segment's values by the segment's factor and adds the products to `out`.

    factors: float32 (len(span.segments),). out: float32 (fragment.length,), contiguous; changed in place.
    Raises FrameError if the payload does not decode to span.length values. `out` is then unchanged.
    """
    content_add(decompress(payload, span, codec), span, codec, factors, out)


def content_add(content: Content, span: FrameSpan, codec: Codec, factors: F32, out: F32) -> None:
    """Adds values to `out` like `decode_add`, but takes decompressed content, which must be valid."""
    target = out[span.place]
    if codec is Codec.FLOAT32:
        target += np.repeat(factors, lengths(span)) * content.view("<f4")
    else:
        frame_kernels.accumulate(*_parts(content, span, codec), lengths(span), LEVELS[codec], factors, target)


def content_advance(content: Content, span: FrameSpan, codec: Codec, base: F32, out: F32) -> None:
    """Writes base + values to the frame's place in `out`. base, out: float32 (fragment.length,), not overlapping."""
    place = span.place
    if codec is Codec.FLOAT32:
        np.add(base[place], content.view("<f4"), out=out[place])
    else:
        frame_kernels.advance(base[place], *_parts(content, span, codec), lengths(span), LEVELS[codec], out[place])


def pack(content: Content, *, compressed: bool) -> bytes:
    """Returns the payload of a frame's content, in one of the two forms that `decompress` accepts."""
    return compress(content) if compressed else store(content)


def compress(content: Content) -> bytes:
    """Compresses the content of a frame. Returns the payload."""
    return _zstd().compressor.compress(content.data)


def store(content: Content) -> bytes:
    """Returns a payload with uncompressed content, for links that are faster than the compressor.

    The payload is a zstd frame of raw blocks (RFC 8878, section 3.1.1.2.2), so `decompress` takes either form.
    """
    return b"".join(stored(content))


def stored(content: Content) -> tuple[Payload, ...]:
    """Returns the payload of `store` in pieces, which view the content instead of copying it."""
    size, view = len(content), content.data
    parts: list[Payload] = [STORED, struct.pack("<I", size)]
    for begins in range(0, size, LARGEST_BLOCK):
        block = view[begins : begins + LARGEST_BLOCK]
        last = begins + LARGEST_BLOCK >= size
        parts += [struct.pack("<I", len(block) << 3 | last)[:3], block]
    return tuple(parts)


def compressed(payload: bytes) -> bytes:
    """Returns the compressed form of a payload that `store` made in this process."""
    return _zstd().compressor.compress(_zstd().decompressor.decompress(payload))


def decompress(payload: Payload, span: FrameSpan, codec: Codec) -> Content:
    """Returns the content of a payload. Checks the declared size first, so that a zip bomb cannot exhaust memory.

    Raises FrameError if the payload is not valid.
    """
    expected = content_bytes(span, codec)
    try:
        declared = zstandard.get_frame_parameters(payload).content_size
        if declared != expected:
            raise FrameError(f"declares {declared} bytes of content instead of {expected}")
        content = _zstd().decompressor.decompress(payload, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"is not a zstd frame ({error})") from error
    if len(content) != expected:
        raise FrameError(f"has {len(content)} bytes of content instead of {expected}")
    return np.frombuffer(content, np.uint8)


# ------------------------------------------------------------------------------------------------- sizes and sums


def lengths(span: FrameSpan) -> NDArray[np.int64]:
    """Returns the lengths of a frame's segments for kernels: int64 (len(span.segments),)."""
    return np.frombuffer(span.lengths, np.int64)


def content_bytes(span: FrameSpan, codec: Codec) -> int:
    """Returns the size of a frame's content in bytes, before compression."""
    return code_bytes(span, codec) + (0 if codec is Codec.FLOAT32 else 2 * span.blocks)


def code_bytes(span: FrameSpan, codec: Codec) -> int:
    """Returns the size of a content's codes in bytes, which is also the offset of its scales."""
    return {Codec.INT4: span.packed_bytes, Codec.INT8: span.length, Codec.FLOAT32: 4 * span.length}[codec]


def max_payload_bytes(span: FrameSpan, codec: Codec) -> int:
    """Returns an upper bound on a valid payload's size in bytes, including zstd's overhead for incompressible data."""
    size = content_bytes(span, codec)
    return size + (size >> 8) + 512


def vector_crc32c(vector: F32, before: int = 0) -> int:
    """Returns the CRC-32C of a vector's little-endian bytes, which is the checksum of anchors.

    before: the CRC-32C of the bytes that precede the vector.
    """
    return crc32c(np.ascontiguousarray(vector, "<f4").view(np.uint8).data, before)


def frames_digest(frames: Sequence[tuple[int, int]]) -> bytes:
    """Returns the SHA-256 over the (payload length, CRC-32C) pairs of all frames, in order.

    This digest identifies a contribution's bytes.
    """
    return hashlib.sha256(b"".join(struct.pack("<QI", length, crc) for length, crc in frames)).digest()


def warm_up() -> None:
    """Compiles the kernels that this module uses, or loads them from disk, so that training does not wait for numba."""
    span = FrameSpan(0, 0, BLOCK + 3, (Segment(0, 0, BLOCK + 2), Segment(1, BLOCK + 2, 1)))
    vector = np.ones(span.length, np.float32)
    for codec in Codec:
        payload = encode_frame(vector, span, codec)
        check_frame(payload, span, codec)
        content = decompress(payload, span, codec)
        content_add(content, span, codec, np.ones(2, np.float32), vector)
        content_advance(content, span, codec, vector, vector.copy())


# ------------------------------------------------------------------------------------------------- private


class _Zstd(threading.local):
    """The compressor and the decompressor of one thread. Neither is thread-safe."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Zstd()


def _zstd() -> _Zstd:
    return _local


def _parts(content: Content, span: FrameSpan, codec: Codec) -> tuple[Content, NDArray[np.uint16]]:
    size = code_bytes(span, codec)
    return content[:size], content[size:].view("<u2")
