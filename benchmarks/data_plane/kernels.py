"""Measures the codec and the merge on one CPU, on vectors larger than the cache.

The rows compare them with this machine's copy bandwidth, or with eager torch. Each figure is the median of several
passes. Ratios are computed per pass, so that both sides see the same machine speed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from atoll_server.merging import merge
from atoll_server.merging.merge_kernels import frame_step
from atoll_wire.codec import frame_codec, frame_kernels
from atoll_wire.codec.frame_codec import LEVELS
from atoll_wire.layout.frame_spans import BLOCK, Codec
from atoll_wire.layout.layout import FragmentLayout, MergeKind, TensorSpec, plan
from numpy.typing import NDArray

from benchmarks.data_plane.rows import Row

PARAMETERS = 1 << 25  # 128 MiB as float32
PASSES = 9
DECODED_BYTES = (
    8.0 + 0.5 + 2 / BLOCK
)  # bytes per parameter of decode-accumulate: the value is read and written, its code and scale are read
STEP_BYTES = 24.0 + 2 * (0.5 + 2 / BLOCK)  # theta, momentum, theta_pub and codes are read and written


def rows() -> Iterator[Row]:
    """Measures all kernels, and yields a row for each."""
    frame_codec.warm_up()
    merge.warm_up()
    torch.set_num_threads(1)
    fragment = plan([TensorSpec("w", (PARAMETERS // 1024, 1024), "float32", MergeKind.DIRECTION)], 1).fragments[0]
    vector = (np.random.default_rng(0).standard_normal(PARAMETERS) * 1e-3).astype(np.float32)
    other, contents = (
        vector.copy(),
        [frame_codec.quantise_frame(vector[s.place], s, Codec.INT4) for s in fragment.frames],
    )

    def copy() -> object:
        np.copyto(other, vector)
        return None

    yield _decode(fragment, contents, other, copy)
    yield _decode_beside_torch(fragment, contents, other)
    yield _step(fragment, contents, vector, copy)
    yield from _encode(fragment, vector)


def seconds(work: Callable[[], object]) -> float:
    """Returns the wall-clock seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def beside(work: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Returns medians over alternating passes: seconds of `work`, and the duration of `other` relative to `work`."""
    times = [(seconds(work), seconds(other)) for _ in range(PASSES)][1:]
    return statistics.median(t for t, _ in times), statistics.median(o / t for t, o in times)


def _decode(
    fragment: FragmentLayout, contents: list[frame_codec.Content], out: frame_codec.F32, copy: Callable[[], object]
) -> Row:
    ones = np.ones(1, np.float32)

    def add() -> object:
        for content, span in zip(contents, fragment.frames, strict=True):
            frame_codec.content_add(content, span, Codec.INT4, ones, out)
        return None

    took, ratio = beside(add, copy)
    rate = f"{PARAMETERS / took / 1e9:.1f} G parameters/s"
    return Row("int4 decode-accumulate, one CPU", ratio * DECODED_BYTES / 8, 0.6, "x copy bandwidth", rate, most=False)


def _decode_beside_torch(fragment: FragmentLayout, contents: list[frame_codec.Content], out: frame_codec.F32) -> Row:
    """Compares the codec with eager torch that unpacks, scales and adds the same frames."""
    ones, size = np.ones(1, np.float32), len(contents) // 8
    parts = []
    for content, span in zip(contents[:size], fragment.frames, strict=False):
        code_bytes = frame_codec.code_bytes(span, Codec.INT4)
        codes = torch.from_numpy(content[:code_bytes]).view(-1, BLOCK // 2)
        scales = torch.from_numpy(content[code_bytes:].view(np.int16)).view(torch.bfloat16)
        parts.append((codes, scales, torch.from_numpy(out[span.place])))

    def eager() -> object:
        for codes, scales, target in parts:
            low = (codes & 0xF).to(torch.int8)
            high = (codes >> 4).to(torch.int8)
            values = torch.cat([low, high], 1)
            values = torch.where(values > 7, values - 16, values).to(torch.float32)
            target.add_((values * scales.to(torch.float32)[:, None]).view(-1))
        return None

    def add() -> object:
        for content, span in zip(contents[:size], fragment.frames, strict=False):
            frame_codec.content_add(content, span, Codec.INT4, ones, out)
        return None

    _, ratio = beside(add, eager)
    return Row("int4 decode-accumulate, one CPU", ratio, 20.0, "x eager torch", "the same frames", most=False)


def _step(
    fragment: FragmentLayout, contents: list[frame_codec.Content], vector: frame_codec.F32, copy: Callable[[], object]
) -> Row:
    theta = vector.copy()
    momentum = vector * np.float32(0.1)
    theta_pub = vector.copy()
    update, one = np.empty_like(contents[0]), np.ones(1, np.float32)
    rates, factor = np.array([0.9, 0.5, 0.5], np.float32), np.ones((1, 1), np.float32)

    def step() -> object:
        for content, span in zip(contents, fragment.frames, strict=True):
            place, code_bytes = span.place, frame_codec.code_bytes(span, Codec.INT4)
            frame_step(
                merge.addresses([content]),
                code_bytes,
                LEVELS[Codec.INT4],
                frame_codec.lengths(span),
                factor,
                one,
                rates,
                theta[place],
                momentum[place],
                theta_pub[place],
                theta_pub[place],
                merge.addresses([update]),
                code_bytes,
                LEVELS[Codec.INT4],
            )
        return None

    took, ratio = beside(step, copy)
    rate = f"{PARAMETERS / took / 1e9:.2f} G parameters/s, decoding a contribution included"
    return Row("Nesterov and published update", ratio * STEP_BYTES / 8, 0.5, "x copy bandwidth", rate, most=False)


def _encode(fragment: FragmentLayout, vector: frame_codec.F32) -> Iterator[Row]:
    content = np.empty(frame_codec.content_bytes(fragment.frames[0], Codec.INT4), np.uint8)

    def quantise() -> object:
        for span in fragment.frames:
            size = frame_codec.code_bytes(span, Codec.INT4)
            parts = content[:size], content[size:].view("<u2")
            frame_kernels.quantise(vector[span.place], frame_codec.lengths(span), LEVELS[Codec.INT4], *parts)
        return None

    payloads: list[bytes] = []

    def encode() -> object:
        payloads[:] = [frame_codec.encode_frame(vector, span, Codec.INT4) for span in fragment.frames]
        return None

    took, ratio = beside(quantise, encode)
    rate = PARAMETERS / took / 1e9
    with_zstd = f"{rate / ratio:.2f} G/s with zstd"
    yield Row("int4 quantise and pack, one CPU", rate, 1.5, "G parameters/s", with_zstd, most=False)
    gap, bits, error = rate_above_bound(fragment, vector, payloads)
    told = f"{bits:.2f} bits per parameter, scales included, at a relative error of {error:.3f}"
    yield Row("int4 above the Gaussian rate-distortion bound", gap, 0.3, "bits", told)


def rate_above_bound(
    fragment: FragmentLayout, vector: NDArray[np.float32], payloads: list[bytes]
) -> tuple[float, float, float]:
    """Returns (bits above log2(1 / D), bits, D), with bits per parameter. D: relative error of the decoded values."""
    out = np.empty_like(vector)
    for span, payload in zip(fragment.frames, payloads, strict=True):
        frame_codec.decode_frame(payload, span, Codec.INT4, out)
    error = float(np.linalg.norm(out - vector) / np.linalg.norm(vector))
    bits = 8 * sum(map(len, payloads)) / len(vector)
    return bits - math.log2(1 / error), bits, error
