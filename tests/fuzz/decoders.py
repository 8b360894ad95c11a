"""Fuzzed: frames, layouts, files of tensors. Each ends as a value, or as the one error that it declares."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import zstandard
from atoll_server.initial import checked
from atoll_server.tensorfile import TensorFileError, open_tensors
from atoll_wire import codec
from atoll_wire.codec import Codec, FrameError
from atoll_wire.layout import LayoutError, MergeKind, TensorSpec, plan

from tests.fuzz.mutate import TEXT, WHOLE, mutate_bytes

SPECS = (
    TensorSpec("embedding", (40, 16), "float32", MergeKind.AVERAGE),
    TensorSpec("large", (60, 50), "float32", MergeKind.DIRECTION),
    TensorSpec("norm", (33,), "float32", MergeKind.DIRECTION),
)
FRAGMENT = plan(SPECS, 1).fragments[0]
SPAN = FRAGMENT.frames[0]
GUARD = 64  # values around a frame's place that nobody may touch


class Frames:
    """Payloads of one frame, in all codecs: changed after compression, before it, or bombs."""

    def __init__(self) -> None:
        vector = np.random.default_rng(0).standard_normal(FRAGMENT.length).astype(np.float32)
        self._sound = {kind: codec.encode_frame(vector, SPAN, kind) for kind in Codec}
        self._out = np.zeros(FRAGMENT.length, np.float32)

    def one(self, rng: random.Random) -> None:
        """One payload, checked, decoded, and added."""
        kind = rng.choice(list(Codec))
        payload = self._payload(rng, kind)
        try:
            squares = codec.check_frame(payload, SPAN, kind)
        except FrameError:
            return
        assert np.isfinite(squares).all()
        assert (squares >= 0).all()
        self._out[:] = 7.0
        codec.decode_frame(payload, SPAN, kind, self._out)
        assert np.isfinite(self._out).all()
        codec.decode_add(payload, SPAN, kind, np.ones(len(SPAN.segments), np.float32), self._out)

    def _payload(self, rng: random.Random, kind: Codec) -> bytes:
        sound = self._sound[kind]
        match rng.randrange(5):
            case 0:
                return mutate_bytes(rng, sound)
            case 1:  # a bomb: much content from few bytes, with its size declared or not
                size = rng.choice((0, 1, len(sound), 1 << 20, 1 << 26))
                return zstandard.ZstdCompressor(level=1, write_content_size=rng.random() < 0.5).compress(bytes(size))
            case 2:
                return sound + rng.choice((sound, b"", rng.randbytes(8)))
            case _:
                content = zstandard.decompress(sound, max_output_size=1 << 24)
                return zstandard.compress(mutate_bytes(rng, content), 1)


class Layouts:
    """Tensors as a Join may declare them."""

    def one(self, rng: random.Random) -> None:
        """One plan, which covers every parameter once, or a LayoutError."""
        specs = [self._spec(rng, spec) for spec in rng.sample(SPECS, rng.randrange(1, 4))]
        specs += [rng.choice(specs)] if rng.random() < 0.1 else []
        try:
            layout = plan(specs, rng.choice((0, 1, 2, 7, 24, 4096)))
        except LayoutError:
            return
        assert sum(fragment.length for fragment in layout.fragments) == layout.parameters
        for fragment in layout.fragments:
            assert sum(span.length for span in fragment.frames) == fragment.length

    def _spec(self, rng: random.Random, spec: TensorSpec) -> TensorSpec:
        shape = list(spec.shape)
        if rng.random() < 0.5:  # as `OuterService._tensors` lets through: a product within the limit
            shape = [rng.choice((0, 1, 3, 17, 256)) for _ in range(rng.randrange(0, 3))]
        name = rng.choice((spec.name, *TEXT)) if rng.random() < 0.3 else spec.name
        kind = rng.choice(list(MergeKind)) if rng.random() < 0.3 else spec.kind
        dtype = (
            rng.choice(("float32", "bfloat16", "float16", "int8", "", "float64")) if rng.random() < 0.2 else spec.dtype
        )
        tied = tuple(rng.sample(TEXT, 2)) if rng.random() < 0.1 else ()
        return TensorSpec(name, tuple(shape), dtype, kind, tied)


class TensorFiles:
    """Files of first parameters."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory()
        self._path = Path(self._place.name) / "file.safetensors"
        tensors = {spec.name: np.ones(spec.shape, np.float32) for spec in SPECS}
        self._sound = safetensors.numpy.save(tensors, {"format": "pt"})
        self._head = int.from_bytes(self._sound[:8], "little")

    def one(self, rng: random.Random) -> None:
        """One file, opened, checked, read."""
        self._path.write_bytes(self._content(rng))
        try:
            file = checked(open_tensors(self._path), SPECS)
            values = [file.float32(spec.name) for spec in SPECS]
        except TensorFileError:
            return
        assert [len(each) for each in values] == [spec.size for spec in SPECS]

    def _content(self, rng: random.Random) -> bytes:
        head, data = self._sound[8 : 8 + self._head], self._sound[8 + self._head :]
        match rng.randrange(4):
            case 0:
                return mutate_bytes(rng, self._sound)
            case 1:
                return rng.choice(WHOLE).to_bytes(8, "little") + head + data
            case 2:
                head = head.replace(b"0", str(rng.choice(WHOLE)).encode(), rng.randrange(1, 4))
            case _:
                head = mutate_bytes(rng, head)
        return len(head).to_bytes(8, "little") + head + (mutate_bytes(rng, data) if rng.random() < 0.3 else data)
