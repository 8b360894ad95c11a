"""Kernels over many pieces of memory are bit-identical to numpy."""

from __future__ import annotations

import numpy as np
import pytest
from atoll.fragments.segments import Coded, FragmentShape, SegmentAddresses, load, rebase, store, take
from atoll_wire.codec import frame_codec
from atoll_wire.codec.frame_codec import CodecError
from atoll_wire.layout.frame_spans import BLOCK, Codec
from atoll_wire.layout.layout import FRAME_PARAMETERS, FragmentLayout, MergeKind, TensorSpec, plan

SIZES = (FRAME_PARAMETERS + 3 * BLOCK + 5, 1, BLOCK, BLOCK + 1, 77)  # one spans two frames; odd ends


def fragment() -> FragmentLayout:
    tensors = [TensorSpec(f"t{n}", (size,), "float32", MergeKind.DIRECTION) for n, size in enumerate(SIZES)]
    return plan(tensors, 1).fragments[0]


FRAGMENT = fragment()


def scattered(vector: np.ndarray) -> tuple[list[np.ndarray], SegmentAddresses, FragmentShape]:
    """Returns the fragment's pieces, each in its own memory."""
    shape = FragmentShape.of(FRAGMENT.whole, Codec.INT4)
    pieces = [vector[p.offset : p.offset + p.length].copy() for p in FRAGMENT.pieces]
    return pieces, SegmentAddresses.in_pieces([piece.ctypes.data for piece in pieces], shape, pieces), shape


def random(seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(FRAGMENT.length) * scale).astype(np.float32)


def test_scattered_pieces_are_read_and_written_as_one_vector():
    pieces, places, shape = scattered(random(1))
    assert np.array_equal(load(places, shape), random(1))
    store(random(3), places, shape)
    assert np.array_equal(np.concatenate(pieces), random(3))


@pytest.mark.parametrize("kind", Codec)
def test_a_taken_pseudo_gradient_is_the_codecs_content_of_the_difference(kind):
    _, places, _ = scattered(random(1))
    found = take(random(2), places, FragmentShape.of(FRAGMENT.whole, kind))
    difference = random(2) - random(1)
    for content, span in zip(found.contents, FRAGMENT.frames, strict=True):
        assert np.array_equal(content, frame_codec.quantise_frame(difference[span.place], span, kind))


@pytest.mark.parametrize("kind", Codec)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_work_that_is_not_finite_is_not_taken(kind, value):
    pieces, places, _ = scattered(random(1))
    pieces[-1][-1] = value
    with pytest.raises(CodecError, match="not finite"):
        take(random(2), places, FragmentShape.of(FRAGMENT.whole, kind))


@pytest.mark.parametrize("kind", Codec)
def test_rebasing_takes_off_what_was_sent(kind):
    shape = FragmentShape.of(FRAGMENT.whole, kind)
    pieces, places, _ = scattered(random(1))
    sent, q = random(4, 1e-3), np.empty(FRAGMENT.length, np.float32)
    contents = []
    for span in FRAGMENT.frames:
        payload = frame_codec.encode_frame(sent, span, kind)
        contents.append(frame_codec.decompress(payload, span, kind))
        frame_codec.decode_frame(payload, span, kind, q)
    rebase(random(2), random(3), Coded.of(tuple(contents)), places, shape)
    assert np.array_equal(np.concatenate(pieces), random(3) - ((random(2) - random(1)) - q))


def test_rebasing_with_nothing_merged_keeps_all_work():
    pieces, places, shape = scattered(random(1))
    rebase(random(2), random(3), None, places, shape)
    assert np.array_equal(np.concatenate(pieces), random(3) - (random(2) - random(1)))
