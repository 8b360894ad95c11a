"""The codec is bit-identical to its reference, within its error bounds, and safe with any input."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.codec.frame_codec import CodecError, FrameError
from atoll_wire.layout.frame_spans import BLOCK, Codec, Compression, FrameSpan, Segment
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.wire import reference

CODED = [Codec.INT4, Codec.INT8]


def span_of(*lengths: int, offset: int = 0) -> FrameSpan:
    segments, at = [], offset
    for piece, length in enumerate(lengths):
        segments.append(Segment(piece, at, length))
        at += length
    return FrameSpan(0, offset, sum(lengths), tuple(segments))


lengths = st.lists(st.integers(1, 700), min_size=1, max_size=4)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def frames(draw):
    span = span_of(*draw(lengths))
    seed = draw(st.integers(0, 2**32 - 1))
    values = (
        np.random.default_rng(seed).standard_normal(span.length) * draw(st.sampled_from([1e-40, 1e-4, 1.0, 1e30]))
    ).astype(np.float32)
    odd = draw(hnp.arrays(np.float32, min(span.length, 40), elements=floats))
    values[: len(odd)] = odd
    return span, values


@pytest.mark.parametrize("kind", CODED)
@given(frame=frames())
@settings(max_examples=60, deadline=None)
def test_kernels_give_the_bytes_of_the_reference(kind, frame):
    span, values = frame
    assert bytes(frame_codec.quantise_frame(values, span, kind)) == reference.content(values, span, kind)


@pytest.mark.parametrize("kind", CODED)
@given(frame=frames())
@settings(max_examples=60, deadline=None)
def test_decoding_is_bit_equal_to_the_reference_and_close_to_the_values(kind, frame):
    span, values = frame
    out = np.full(span.length, np.nan, np.float32)
    frame_codec.decode_frame(frame_codec.encode_frame(values, span, kind), span, kind, out)
    assert np.array_equal(out, reference.decoded(values, span, kind))
    for place in reference.blocks(span):
        scale = reference.scale_of(values[place], frame_codec.LEVELS[kind])
        most = np.float64(np.abs(values[place]).max())
        # Half a step, plus the values that int4 scales down or clips, unless the scale is below float32's normal range.
        step = np.float64(scale) if scale else most
        clipped = max(0.0, most - frame_codec.LEVELS[kind] * np.float64(scale)) if scale else 0.0
        error = np.abs(out[place].astype(np.float64) - values[place])
        smaller = 0.0201 * most if kind is Codec.INT4 else 0.0
        assert error.max() <= 0.5001 * step + max(clipped, smaller) + (most if not scale else 0.0)


@given(frame=frames())
@settings(max_examples=40, deadline=None)
def test_float32_is_coded_bit_by_bit(frame):
    span, values = frame
    values[0] = -0.0
    out = np.empty(span.length, np.float32)
    frame_codec.decode_frame(frame_codec.encode_frame(values, span, Codec.FLOAT32), span, Codec.FLOAT32, out)
    assert out.tobytes() == values.tobytes()


@pytest.mark.parametrize("kind", CODED)
@given(frame=frames())
@settings(max_examples=40, deadline=None)
def test_checking_a_frame_gives_the_squares_of_what_it_decodes_to(kind, frame):
    span, values = frame
    _, found = frame_codec.check_frame(frame_codec.encode_frame(values, span, kind), span, kind)
    decoded, position = reference.decoded(values, span, kind).astype(np.float64), 0
    for segment, square in zip(span.segments, found, strict=True):
        part = decoded[position : position + segment.length]
        assert square == pytest.approx(np.dot(part, part), rel=1e-9, abs=1e-300)
        position += segment.length


@pytest.mark.parametrize("kind", CODED)
def test_adding_uses_the_factor_of_each_segment_and_its_place(kind):
    span = span_of(300, 5, offset=7)
    vector = np.random.default_rng(1).standard_normal(320).astype(np.float32)
    out = np.ones(320, np.float32)
    frame_codec.decode_add(
        frame_codec.encode_frame(vector, span, kind), span, kind, np.array([2.0, 0.0], np.float32), out
    )
    wanted = np.ones(320, np.float32)
    wanted[7:307] += 2.0 * reference.decoded(vector[7:312], span, kind)[:300]
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("kind", CODED)
def test_error_is_fed_back_and_what_is_published_converges(kind):
    span = span_of(1000)
    theta = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    published = np.zeros(1000, np.float32)
    for _ in range(12):
        frame_codec.decode_add(
            frame_codec.encode_frame(theta - published, span, kind), span, kind, np.ones(1, np.float32), published
        )
    assert np.abs(theta - published).max() < 1e-6


def test_int4_of_gaussian_values_is_near_the_rate_distortion_bound():
    span = span_of(1 << 19)
    values = (np.random.default_rng(3).standard_normal(span.length) * 1e-3).astype(np.float32)
    payload, out = frame_codec.encode_frame(values, span, Codec.INT4), np.empty_like(values)
    frame_codec.decode_frame(payload, span, Codec.INT4, out)
    bound = -np.log2(np.linalg.norm(out - values) / np.linalg.norm(values))
    assert 8 * len(payload) / span.length - bound < 0.305


def test_a_blocks_largest_value_keeps_most_of_its_size():
    span, values = span_of(BLOCK), np.full(BLOCK, 1e-3, np.float32)
    values[17], out = 5.0, np.empty(BLOCK, np.float32)
    frame_codec.decode_frame(frame_codec.encode_frame(values, span, Codec.INT4), span, Codec.INT4, out)
    assert 0.84 * 5.0 < out[17] < 5.0


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1])
def test_the_largest_float32_values_can_be_coded(kind, length):
    span, out = span_of(length), np.empty(length, np.float32)
    for largest in np.geomspace(1e37, np.finfo(np.float32).max, 200, dtype=np.float32):
        values = np.full(length, -min(largest, np.finfo(np.float32).max), np.float32)
        payload = frame_codec.encode_frame(values, span, kind)
        frame_codec.check_frame(payload, span, kind)
        frame_codec.decode_frame(payload, span, kind, out)
        assert (np.abs(out / values - 1) < 0.26).all()


@pytest.mark.parametrize("kind", list(Codec))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_not_coded(kind, bad):
    values = np.ones(600, np.float32)
    values[599] = bad
    with pytest.raises(CodecError, match="not finite"):
        frame_codec.encode_frame(values, span_of(600), kind)


def _payload(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


SPAN = span_of(BLOCK + 1)
SOUND = reference.content(np.ones(BLOCK + 1, np.float32), SPAN, Codec.INT4)
SCALES_AT = len(SOUND) - 4


def _with_scale(bits: int) -> bytes:
    return _payload(SOUND[:SCALES_AT] + bits.to_bytes(2, "little") + SOUND[SCALES_AT + 2 :])


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "zstd"),
        (b"not zstd at all", "zstd"),
        (_payload(SOUND)[:-3], "zstd"),
        (_payload(SOUND + b"\0"), "declares"),
        (_payload(SOUND[:-1]), "declares"),
        (_payload(bytes(1 << 30)), "declares"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(SOUND), "declares"),
        (_payload(SOUND) + b"more", "zstd"),
        (_with_scale(0x7FC0), "scale"),  # NaN
        (_with_scale(0x7F80), "scale"),  # infinite
        (_with_scale(0xBF80), "scale"),  # negative
        (_with_scale(0x8000), "scale"),  # negative zero
        (_with_scale(0x0001), "scale"),  # subnormal
        (_with_scale(0x7F7F), "scale"),  # times 7, this exceeds float32
        (_payload(b"\x08" + SOUND[1:]), "code"),  # -8 is never used
        (_payload(SOUND[: BLOCK // 2] + b"\x11" + SOUND[BLOCK // 2 + 1 :]), "code"),  # padding that is not zero
    ],
)
def test_a_payload_that_no_valid_encoder_makes_is_refused(payload, why):
    frame_codec.check_frame(_payload(SOUND), SPAN, Codec.INT4)
    with pytest.raises(FrameError, match=why):
        frame_codec.check_frame(payload, SPAN, Codec.INT4)


@given(junk=st.binary(max_size=400), kind=st.sampled_from(list(Codec)), packed=st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_payload_is_decoded_or_refused(junk, kind, packed):
    span = span_of(60, 3)
    try:
        _, squares = frame_codec.check_frame(_payload(junk) if packed else junk, span, kind)
    except FrameError:
        return
    assert np.isfinite(squares).all()


@pytest.mark.parametrize("kind", list(Codec))
def test_an_honest_payload_is_never_above_the_limit(kind):
    span = span_of(5000)
    noise = np.random.default_rng(3).integers(0, 2**31 - 2**24, 5000, dtype=np.int32).view(np.float32)
    assert len(frame_codec.encode_frame(noise, span, kind)) <= frame_codec.max_payload_bytes(span, kind)


@pytest.mark.parametrize("kind", list(Codec))
@pytest.mark.parametrize("length", [1, 512, 40_000, 600_000])  # up to 19 blocks of zstd
def test_a_stored_payload_is_a_zstd_frame_with_the_same_content_as_a_compressed_one(kind, length):
    span = span_of(length)
    content = frame_codec.quantise_frame(
        np.random.default_rng(1).standard_normal(length).astype(np.float32), span, kind
    )
    stored = frame_codec.store(content)
    assert zstandard.ZstdDecompressor().decompress(stored) == content.tobytes()
    assert np.array_equal(frame_codec.decompress(stored, span, kind), content)
    assert len(content) < len(stored) <= frame_codec.max_payload_bytes(span, kind)
    assert frame_codec.compressed(stored) == frame_codec.compress(content)
    with pytest.raises(FrameError):
        frame_codec.decompress(stored[:-1], span, kind)


def test_compression_applies_to_slow_links_unless_a_setting_says_otherwise():
    applied = {each: [each.applies(fast=fast) for fast in (False, True)] for each in Compression}
    assert applied == {
        Compression.AUTO: [True, False], Compression.ALWAYS: [True, True], Compression.NEVER: [False, False],
    }  # fmt: skip
    assert Compression.of(0) is Compression.of(9) is Compression.AUTO


def test_int4_needs_about_three_and_a_half_bits_for_gaussian_values():
    span = span_of(1 << 18)
    vector = np.random.default_rng(4).standard_normal(1 << 18).astype(np.float32)
    assert 8 * len(frame_codec.encode_frame(vector, span, Codec.INT4)) / span.length < 3.45


def test_the_digest_depends_on_frames_and_their_order():
    assert frame_codec.frames_digest([(1, 2), (3, 4)]) != frame_codec.frames_digest([(3, 4), (1, 2)])
    assert len(frame_codec.frames_digest([(1, 2)])) == 32


def test_crc32c_is_castagnoli():
    assert crc32c(b"123456789") == 0xE3069283
