"""Fuzzes frames and layouts. Each input gives a value, or the error that the decoder declares."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from atoll.agent.join_request import tensor_message
from atoll_server.access.refusals import Refused
from atoll_server.run.joining import declared_tensors
from atoll_server.settings import Limits
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.frame_codec import FrameError
from atoll_wire.layout.frame_spans import Codec, FrameSpan, Segment
from atoll_wire.layout.layout import LayoutError, MergeKind, TensorSpec, plan

from tests.fuzz.mutate import TEXT, mutate_message
from tests.fuzz.payloads import stored, unsound
from tests.fuzz.watch import in_room

SPECS = (
    TensorSpec("embedding", (40, 16), "float32", MergeKind.AVERAGE),
    TensorSpec("large", (60, 50), "float32", MergeKind.DIRECTION),
    TensorSpec("norm", (33,), "float32", MergeKind.DIRECTION),
)
FRAGMENT = plan(SPECS, 1).fragments[0]
GUARD = 64  # values around a frame's place that must not change
MAX_FRAME_BYTES = 1 << 18  # limit on memory; a frame has 15 kB
MAX_LAYOUT_BYTES = 1 << 24
LIMITS = Limits(learners=32, parameters=1 << 20, model_bytes=1 << 24, spool_bytes=1 << 26, notifications=64, tensors=64)


class Frames:
    """Payloads of one frame, in all codecs: changed after compression or before it, or bombs."""

    row = 1

    def __init__(self) -> None:
        span = FRAGMENT.frames[0]
        # The vector is longer than the frame, so that writes beyond the frame are detected.
        segments = tuple(Segment(s.piece, s.offset + GUARD, s.length) for s in span.segments)
        self._span = FrameSpan(0, GUARD, span.length, segments)
        self._out = np.zeros(span.length + 2 * GUARD, np.float32)
        values = np.random.default_rng(0).standard_normal(len(self._out)).astype(np.float32)
        self._sound = {kind: frame_codec.encode_frame(values, self._span, kind) for kind in Codec}

    def one(self, rng: random.Random) -> bool:
        """Checks, decodes and adds one payload."""
        kind = rng.choice(list(Codec))
        sound = self._sound[kind]
        payload = stored(sound) if rng.random() < 0.01 else unsound(rng, sound, self._span, kind)
        with in_room(MAX_FRAME_BYTES):
            return self._feed(payload, kind)

    def _feed(self, payload: bytes, kind: Codec) -> bool:
        factors = np.ones(len(self._span.segments), np.float32)
        try:
            _, squares = frame_codec.check_frame(payload, self._span, kind)
        except FrameError:
            self._unchecked(payload, kind, factors)
            return False
        assert np.isfinite(squares).all()
        assert (squares >= 0).all()
        self._out[:] = 7.0
        frame_codec.decode_frame(payload, self._span, kind, self._out)
        assert np.isfinite(self._out).all()
        found = float((self._out[GUARD:-GUARD].astype(np.float64) ** 2).sum())
        assert np.isclose(found, squares.sum(), rtol=1e-6), "the check and the decoder must see the same values"
        frame_codec.decode_add(payload, self._span, kind, factors, self._out)
        self._guarded()
        return True

    def _unchecked(self, payload: bytes, kind: Codec, factors: np.ndarray[Any, Any]) -> None:
        """Decodes without a check of codes and scales, as a learner does. The anchor's checksum detects errors."""
        self._out[:] = 7.0
        try:
            frame_codec.decode_add(payload, self._span, kind, factors, self._out)
        except FrameError:
            assert (self._out == 7.0).all(), "a refused frame must change nothing"
        self._guarded()

    def _guarded(self) -> None:
        assert (self._out[:GUARD] == 7.0).all()
        assert (self._out[-GUARD:] == 7.0).all()

    def close(self) -> None:
        """Does nothing."""


class Layouts:
    """Tensors as a Join declares them, and their layout."""

    row = 1

    def one(self, rng: random.Random) -> bool:
        """Plans one layout, which covers every parameter once, or is refused."""
        tensors = [tensor_message(self._spec(rng, spec)) for spec in rng.sample(SPECS, rng.randrange(1, 4))]
        request = pb.JoinRequest(tensors=tensors + ([rng.choice(tensors)] if rng.random() < 0.05 else []))
        if rng.random() < 0.4:
            request = mutate_message(rng, request)
        fragments = rng.choice((0, 1, 2, 2, 7, 24, 4096))
        with in_room(MAX_LAYOUT_BYTES):
            return self._feed(request, fragments)

    def _feed(self, request: pb.JoinRequest, fragments: int) -> bool:
        try:
            layout = plan(declared_tensors(request, LIMITS), fragments)
        except (Refused, LayoutError) as error:
            str(error).encode()  # as gRPC encodes it
            return False
        assert sum(fragment.length for fragment in layout.fragments) == layout.parameters
        for fragment in layout.fragments:
            assert sum(span.length for span in fragment.frames) == fragment.length
            assert sum(piece.length for piece in fragment.pieces) == fragment.length
        return True

    def _spec(self, rng: random.Random, spec: TensorSpec) -> TensorSpec:
        shape = list(spec.shape)
        if rng.random() < 0.5:
            shape = [rng.choice((0, 1, 3, 17, 256)) for _ in range(rng.randrange(0, 3))]
        name = rng.choice((spec.name, *TEXT)) if rng.random() < 0.1 else spec.name
        kind = rng.choice(list(MergeKind)) if rng.random() < 0.3 else spec.kind
        dtype = rng.choice(("bfloat16", "float16", "int8", "")) if rng.random() < 0.1 else spec.dtype
        tied = tuple(rng.sample(TEXT, 2)) if rng.random() < 0.1 else ()
        return TensorSpec(name, tuple(shape), dtype, kind, tied)

    def close(self) -> None:
        """Does nothing."""
