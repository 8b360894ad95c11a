"""PURE: contributions of one round into one new version of a fragment. No IO of its own, no clock.

Two passes over frames, so that nothing larger than one fragment of scratch is held (2604.21428, App. D.2):
1. scratch = sum of factor x contribution, where the factor is the normalised weight w, or w / ||v|| for a piece
   that is merged by direction; and the norm of each piece's combination, summed in float64, frame by frame.
2. Delta = scratch, or scratch x (sum w ||v||) / ||scratch|| for a piece merged by direction;
   momentum = mu momentum + Delta;  theta -= lr (Delta + mu momentum);  theta_pub += Q(theta - theta_pub).
The order of every sum is fixed (contributions by key, frames by index, elements by place, in a fixed number of lanes),
so the same ledger gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from atoll_wire import codec
from atoll_wire.codec import Codec
from atoll_wire.kernels import kernel
from atoll_wire.layout import Fragment, MergeKind
from atoll_wire.spans import FrameSpan, Segment
from numpy.typing import NDArray

LARGEST_NORM = 1e12  # of a piece of a contribution: beyond it a sum could leave what float32 holds
SMALLEST_NORM = 1e-30  # below it a piece has no direction
CANCELLED = 1e-6  # a sum of directions shorter than this is rounding noise: they cancel

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OuterRule:
    """How one outer step is made. lr and momentum of Nesterov's method; codec of the published update."""

    lr: float
    momentum: float
    codec: Codec


@dataclass(slots=True)
class FragmentState:
    """A fragment at one version: exact parameters, what learners were told of them, and momentum; float32 each."""

    version: int
    theta: F32
    theta_pub: F32
    momentum: F32

    def checksums(self) -> tuple[int, int, int]:
        """CRC-32C of theta, theta_pub and momentum."""
        return codec.vector_crc32c(self.theta), codec.vector_crc32c(self.theta_pub), codec.vector_crc32c(self.momentum)


class Contribution(Protocol):
    """What the merge reads of a contribution. norms_sq: float64, one per piece."""

    @property
    def learner(self) -> str:
        """Its name: contributions are merged in this order."""

    @property
    def codec(self) -> Codec:
        """How its frames are coded."""

    @property
    def norms_sq(self) -> F64:
        """Squared norm of each piece, taken when the frames were checked on arrival."""

    @property
    def scale(self) -> float:
        """What it is clipped by: 0..1."""

    def payload(self, frame: int) -> bytes:
        """One frame's payload."""


@dataclass(frozen=True, slots=True)
class Update:
    """A published update: payloads of its frames, and the CRC-32C of theta_pub after it."""

    version: int
    frames: tuple[bytes, ...]
    crc32c: int


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge gave. checksums: CRC-32C of theta, theta_pub and momentum."""

    state: FragmentState
    update: Update
    checksums: tuple[int, int, int]


def start(theta: F32) -> FragmentState:
    """Version 0."""
    return FragmentState(0, theta, theta.copy(), np.zeros_like(theta))


def weight(tokens: int, steps: int, staleness: int, exponent: float) -> float:
    """tokens x (tokens / steps) x (1 + staleness)^-exponent (2604.21428; FedAsync 1903.03934 for the staleness)."""
    return tokens * (tokens / steps) * math.pow(1 + staleness, -exponent)


def norms_sq(fragment: Fragment, per_frame: Sequence[F64]) -> F64:
    """Squared norm of each piece, from what `codec.check_frame` found for each frame, in frame order."""
    sums = np.zeros(len(fragment.pieces), np.float64)
    for span, squares in zip(fragment.frames, per_frame, strict=True):
        for segment, square in zip(span.segments, squares, strict=True):
            sums[segment.piece] += square
    return sums


def merge(
    fragment: Fragment,
    state: FragmentState,
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    rule: OuterRule,
    scratch: F32,
) -> Merged:
    """One outer step.

    weights: normalised, one per contribution; scratch: float32 (fragment.length,): it becomes the new theta_pub, and
    the old one stays as it is for those who still read it. theta and momentum are changed in place, and only after
    every contribution was read: a FrameError leaves the state untouched. Norms up to LARGEST_NORM cannot make a sum
    that is not finite.
    """
    assert contributions, "scratch would keep what was in it"
    learners = [contribution.learner for contribution in contributions]
    assert learners == sorted(learners), "contributions are merged in sorted learner order"
    factors = [_factors(fragment, c, w) for c, w in zip(contributions, weights, strict=True)]
    combined_sq = _combine(fragment, contributions, factors, scratch)
    radii = np.zeros(len(fragment.pieces), np.float64)
    for contribution, normalised in zip(contributions, weights, strict=True):
        radii += normalised * contribution.scale * np.sqrt(contribution.norms_sq)
    scales = np.ones(len(fragment.pieces), np.float32)
    for index, piece in enumerate(fragment.pieces):
        if piece.kind is MergeKind.DIRECTION:
            norm = math.sqrt(combined_sq[index])
            scales[index] = radii[index] / norm if norm > CANCELLED else 0.0  # phi(0) = 0
    return _step(fragment, state, scales, rule, scratch)


def _factors(fragment: Fragment, contribution: Contribution, normalised: float) -> F32:
    """What each piece of a contribution is multiplied with in the first pass."""
    factors = np.full(len(fragment.pieces), normalised * contribution.scale, np.float64)
    for index, piece in enumerate(fragment.pieces):
        if piece.kind is MergeKind.DIRECTION:
            norm = math.sqrt(contribution.norms_sq[index])
            factors[index] = normalised / norm if norm > SMALLEST_NORM else 0.0
    return factors.astype(np.float32)


def _combine(fragment: Fragment, contributions: Sequence[Contribution], factors: Sequence[F32], scratch: F32) -> F64:
    """First pass: fills scratch with the combination; returns the squared norm of each of its pieces."""
    per_frame = []
    for span in fragment.frames:
        pieces = [segment.piece for segment in span.segments]
        for number, (contribution, factor) in enumerate(zip(contributions, factors, strict=True)):
            payload = contribution.payload(span.index)
            codec.decode_add(payload, span, contribution.codec, factor[pieces], scratch, fresh=number == 0)
        per_frame.append(codec.squares(scratch, span))
    return norms_sq(fragment, per_frame)


def _step(fragment: Fragment, state: FragmentState, scales: F32, rule: OuterRule, scratch: F32) -> Merged:
    """Second pass: Nesterov, and the published update; each frame is summed while it is at hand."""
    frames, theta_crc, theta_pub_crc, momentum_crc = [], 0, 0, 0
    lr, mu = np.float32(rule.lr), np.float32(rule.momentum)
    for span in fragment.frames:
        part = scales[[segment.piece for segment in span.segments]]
        theta, theta_pub, momentum = state.theta[span.place], state.theta_pub[span.place], state.momentum[span.place]
        _nesterov(scratch[span.place], codec.lengths(span), part, lr, mu, theta, momentum, theta_pub)
        content = codec.quantise_frame(scratch[span.place], span, rule.codec)
        codec.content_advance(np.frombuffer(content, np.uint8), span, rule.codec, state.theta_pub, scratch)
        frames.append(codec.compress(content))
        theta_crc = codec.vector_crc32c(theta, theta_crc)
        theta_pub_crc = codec.vector_crc32c(scratch[span.place], theta_pub_crc)
        momentum_crc = codec.vector_crc32c(momentum, momentum_crc)
    new = FragmentState(state.version + 1, state.theta, scratch, state.momentum)
    update = Update(new.version, tuple(frames), theta_pub_crc)
    return Merged(new, update, (theta_crc, theta_pub_crc, momentum_crc))


@kernel
def _nesterov(
    combined: F32,
    lengths: NDArray[np.int64],
    scales: F32,
    lr: np.float32,
    mu: np.float32,
    theta: F32,
    momentum: F32,
    theta_pub: F32,
) -> None:
    """Delta = scale x combined; momentum' = mu momentum + Delta; theta' = theta - lr (Delta + mu momentum').

    scales: of each segment. combined is left holding theta' - theta_pub, which is what is to be published.
    """
    position = 0
    for segment in range(len(lengths)):
        place = slice(position, position + lengths[segment])
        _nesterov_part(combined[place], scales[segment], lr, mu, theta[place], momentum[place], theta_pub[place])
        position += lengths[segment]


@kernel
def _nesterov_part(
    combined: F32, scale: np.float32, lr: np.float32, mu: np.float32, theta: F32, momentum: F32, theta_pub: F32
) -> None:
    """One segment: in slices of their own these loops vectorise."""
    for i in range(len(combined)):
        delta = scale * combined[i]
        moved = mu * momentum[i] + delta
        momentum[i] = moved
        stepped = theta[i] - lr * (delta + mu * moved)
        theta[i] = stepped
        combined[i] = stepped - theta_pub[i]


def warm_up() -> None:
    """Compiles the merge's own kernels, or loads them from disk."""
    span = FrameSpan(0, 0, 1, (Segment(0, 0, 1),))
    ones, one = np.ones(1, np.float32), np.float32(1)
    _nesterov(ones, codec.lengths(span), ones.copy(), one, one, ones.copy(), ones.copy(), ones.copy())
    codec.squares(ones, span)
    for kind in codec.Codec:  # contents that were just made are writable, those that came are not
        content = np.frombuffer(codec.quantise_frame(ones, span, kind), np.uint8)
        codec.content_advance(content, span, kind, ones, ones.copy())
