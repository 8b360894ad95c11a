"""Kernels over many pieces of memory are bit-identical to numpy."""

from __future__ import annotations

import numpy as np
import pytest
from atoll.fragments.segments import Coded, FragmentShape, add, change, code, gather, store
from atoll_wire.codec import frame_codec
from atoll_wire.codec.frame_codec import CodecError
from atoll_wire.layout.frame_spans import BLOCK, Codec
from atoll_wire.layout.layout import FRAME_PARAMETERS, FragmentLayout, FrameRun, MergeKind, TensorSpec, plan

SIZES = (FRAME_PARAMETERS + 3 * BLOCK + 5, 1, BLOCK, BLOCK + 1, 77)  # one tensor spans two frames; sizes are odd


def fragment() -> FragmentLayout:
    tensors = [TensorSpec(f"t{n}", (size,), "float32", MergeKind.DIRECTION) for n, size in enumerate(SIZES)]
    return plan(tensors, 1).fragments[0]


FRAGMENT = fragment()


def scattered(vector: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Returns the fragment's pieces, each in its own memory, with their addresses and places."""
    pieces = [vector[p.offset : p.offset + p.length].copy() for p in FRAGMENT.pieces]
    starts = np.array([piece.ctypes.data for piece in pieces], np.int64)
    return pieces, starts, np.array([(p.offset, p.length) for p in FRAGMENT.pieces], np.int64)


def random(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(FRAGMENT.length) * scale).astype(np.float32)


def test_scattered_pieces_are_read_and_written_as_one_vector():
    pieces, *places = scattered(random(1))
    found = np.empty(FRAGMENT.length, np.float32)
    gather(*places, found)
    assert np.array_equal(found, random(1))
    add(random(2), *places)
    assert np.array_equal(np.concatenate(pieces), random(1) + random(2))
    store(random(3), *places)
    assert np.array_equal(np.concatenate(pieces), random(3))


@pytest.mark.parametrize("kind", Codec)
def test_a_coded_pseudo_gradient_is_the_codecs_content_of_the_difference(kind):
    found = code(random(2), random(1), FragmentShape.of(FRAGMENT.whole, kind))
    difference = random(2) - random(1)
    for content, span in zip(found.contents, FRAGMENT.frames, strict=True):
        assert np.array_equal(content, frame_codec.quantise_frame(difference[span.place], span, kind))


@pytest.mark.parametrize("kind", Codec)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_work_that_is_not_finite_is_not_coded(kind, value):
    values = random(1)
    values[-1] = value
    with pytest.raises(CodecError, match="not finite"):
        code(random(2), values, FragmentShape.of(FRAGMENT.whole, kind))


@pytest.mark.parametrize("kind", Codec)
def test_a_change_includes_sent_work(kind):
    shape, sent, q, contents = FragmentShape.of(FRAGMENT.whole, kind), random(4, 1e-3), random(0), []
    for span in FRAGMENT.frames:
        payload = frame_codec.encode_frame(sent, span, kind)
        contents.append(frame_codec.decompress(payload, span, kind))
        frame_codec.decode_frame(payload, span, kind, q)
    coded = Coded.of(tuple(contents))
    assert np.array_equal(change(random(2), random(3), None, coded, shape), (random(3) - random(2)) + q)
    assert np.array_equal(change(random(2), random(3), None, None, shape), random(3) - random(2))
    assert np.array_equal(change(random(2), random(3), coded, None, shape), q), "the update is known"
    assert np.array_equal(change(random(2), random(3), coded, coded, shape), q + q)


def test_a_rank_without_frames_codes_nothing():
    shape, nothing = FragmentShape.of(FrameRun(FRAGMENT, 0, 0, 0, ()), Codec.INT4), np.empty(0, np.float32)
    assert code(nothing, nothing, shape).contents == []
    assert not len(change(nothing, nothing, None, None, shape))
