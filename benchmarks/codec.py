"""Codec and merge on one core, as ratios to this machine's copy bandwidth measured in the same run.

Vectors do not fit the cache. Each figure is the best of several passes: the least disturbed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
from atoll_server import merge
from atoll_server.merge import OuterRule
from atoll_wire import codec
from atoll_wire.codec import Codec, Content
from atoll_wire.layout import Fragment, MergeKind, TensorSpec, plan
from atoll_wire.spans import FrameSpan
from numpy.typing import NDArray

PARAMETERS = 1 << 24
PASSES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. value in `unit`; beside: the same as a part of the copy bandwidth, in parameters."""

    name: str
    value: float
    unit: str
    beside: float


@dataclass(frozen=True, slots=True)
class Given:
    """A contribution in memory."""

    learner: str
    codec: Codec
    norms_sq: NDArray[np.float64]
    frames: list[bytes]
    scale: float = 1.0

    def content(self, span: FrameSpan) -> Content:
        """One frame."""
        return codec.decompress(self.frames[span.index], span, self.codec)


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few passes."""
    times = []
    for _ in range(PASSES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def rows() -> Iterator[dict[str, object]]:
    """Measures everything, a row at a time."""
    codec.warm_up()
    merge.warm_up()
    fragment = plan([TensorSpec("w", (PARAMETERS // 1024, 1024), "float32", MergeKind.DIRECTION)], 1).fragments[0]
    vector = (np.random.default_rng(0).standard_normal(PARAMETERS) * 1e-3).astype(np.float32)
    other = vector.copy()
    copied = PARAMETERS / best_s(lambda: np.copyto(other, vector)) / 1e9
    yield asdict(Row("copy of float32", copied, "G parameters/s", 1.0))
    for kind in Codec:
        for row in _codec_rows(kind, fragment, vector, other, copied):
            yield asdict(row)
    for learners in (2, 4):
        seconds = best_s(_merge_of(fragment, vector, learners))
        rate = PARAMETERS / seconds / 1e9
        yield asdict(Row(f"merge of {learners} int4 contributions", rate, "G parameters/s", rate / copied))


def _codec_rows(
    kind: Codec, fragment: Fragment, vector: NDArray[np.float32], other: NDArray[np.float32], copied: float
) -> Iterator[Row]:
    name, spans = kind.name.lower(), fragment.frames
    payloads = [codec.encode_frame(vector, span, kind) for span in spans]
    works: dict[str, Callable[[], object]] = {
        "quantise": lambda: [codec.quantise_frame(vector[s.offset : s.offset + s.length], s, kind) for s in spans],
        "encode with zstd": lambda: [codec.encode_frame(vector, s, kind) for s in spans],
        "check": lambda: [codec.check_frame(p, s, kind) for p, s in zip(payloads, spans, strict=True)],
        "decode and add": lambda: _add(payloads, fragment, kind, other),
    }
    for what, work in works.items():
        rate = PARAMETERS / best_s(work) / 1e9
        yield Row(f"{name} {what}", rate, "G parameters/s", rate / copied)
    bits = 8 * sum(map(len, payloads)) / PARAMETERS
    yield Row(f"{name} on Gaussian values", bits, "bits/parameter", bits / 32)


def _add(payloads: list[bytes], fragment: Fragment, kind: Codec, out: NDArray[np.float32]) -> None:
    ones = np.ones(1, np.float32)
    for payload, span in zip(payloads, fragment.frames, strict=True):
        codec.decode_add(payload, span, kind, ones, out)


def _merge_of(fragment: Fragment, vector: NDArray[np.float32], learners: int) -> Callable[[], object]:
    given = []
    for number in range(learners):
        frames = [codec.encode_frame(np.roll(vector, number), span, Codec.INT4) for span in fragment.frames]
        checked = [codec.check_frame(p, s, Codec.INT4)[1] for p, s in zip(frames, fragment.frames, strict=True)]
        given.append(Given(f"{number}", Codec.INT4, merge.norms_sq(fragment, checked), frames))
    state = merge.start(vector.copy())
    rule, weights = OuterRule(0.9, 0.5, Codec.INT4), [1 / learners] * learners
    return lambda: merge.merge(fragment, state, given, weights, rule, state.theta_pub)
