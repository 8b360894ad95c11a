"""PURE: merges the contributions of one round into a new version of a fragment.

A merge makes two passes over the frames (2604.21428, App. D.2). Both passes work on blocks that fit in the CPU cache.
1. The first pass computes the sum of factor x contribution. The factor is the contribution's weight w. For a piece that
is merged by direction, it is w / ||v||, where ||v|| is the norm of the contribution's piece. The first pass keeps only
the squared norm of each piece's sum, in float64.
2. The second pass computes the same sum again, since decoding twice costs less than storing the sum. It then updates
   the fragment, where Q is the rounding by the codec:
       Delta = sum, or sum x (sum of w ||v||) / ||sum|| for a piece that is merged by direction
       momentum = decay x momentum + Delta
       theta -= lr x (Delta + push x momentum)
       theta_pub += Q(theta - theta_pub)
   For a whole outer step, decay and push equal the outer momentum mu (see `OuterRule.decay_and_push`).

The order of every sum is fixed, so that the same ledger always gives the same bytes. Sums run over contributions by
key, over frames by index, and over elements by position, in a fixed number of partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from atoll_wire.codec import frame_codec
from atoll_wire.codec.frame_codec import LEVELS, Content
from atoll_wire.layout.frame_spans import Codec, FrameSpan, Segment
from atoll_wire.layout.layout import FragmentLayout, MergeKind, Piece
from numpy.typing import NDArray

from atoll_server.merging.merge_kernels import frame_squares, frame_step
from atoll_server.rounds.outer_rule import OuterRule, part_of

LARGEST_NORM = 1e12  # limit on a piece's norm, above which a sum could overflow float32
SMALLEST_NORM = 1e-30  # a piece with a smaller norm has no direction
CANCELLED = 1e-6  # a sum of directions with a smaller norm is only rounding noise, since the directions cancel

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I64: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class FragmentState:
    """A fragment at one version. All arrays are float32 (fragment.length,).

    theta: exact parameters. theta_pub: published parameters. momentum: outer momentum.
    """

    version: int
    theta: F32
    theta_pub: F32
    momentum: F32

    def checksums(self) -> tuple[int, int, int]:
        """Returns the CRC-32C checksums of theta, theta_pub and momentum."""
        return (
            frame_codec.vector_crc32c(self.theta),
            frame_codec.vector_crc32c(self.theta_pub),
            frame_codec.vector_crc32c(self.momentum),
        )


class Contribution(Protocol):
    """The interface through which a merge reads a contribution."""

    @property
    def learner(self) -> str:
        """The learner's name, by which a merge sorts contributions."""

    @property
    def codec(self) -> Codec:
        """The codec of the contribution's frames."""

    @property
    def norms_sq(self) -> F64:
        """The squared norm of each piece, float64 (pieces,), as computed when the frames arrived."""

    @property
    def scale(self) -> float:
        """The factor that clips the contribution's norm, from 0 to 1."""

    def content(self, span: FrameSpan) -> Content:
        """Returns the decompressed content of a frame, which consists of codes and then scales."""


@dataclass(frozen=True, slots=True)
class Update:
    """A published update. frames: uncompressed payloads of all frames. crc32c: checksum of the new theta_pub."""

    version: int
    frames: tuple[bytes, ...]
    crc32c: int


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge. checksums: CRC-32C checksums of the new theta, theta_pub and momentum."""

    state: FragmentState
    update: Update
    checksums: tuple[int, int, int]


def start(theta: F32) -> FragmentState:
    """Returns a fragment at version 0, with zero momentum.

    theta: initial parameters, float32 (fragment.length,). Merges change this array in place.
    """
    return FragmentState(0, theta, theta.copy(), np.zeros_like(theta))


def weight(tokens: int, steps: int, staleness: float, exponent: float) -> float:
    """Returns a contribution's weight before normalisation (2604.21428).

    The weight is tokens x (tokens / steps) x max(1, staleness)^-exponent. staleness: staleness in outer steps. The last
    factor is the discount of FedAsync (1903.03934), but applies only to a staleness above 1. A smaller staleness costs
    little quality, and a discount would cost more (records/quality).
    """
    return tokens * (tokens / steps) * math.pow(max(1.0, staleness), -exponent)


def norms_sq(fragment: FragmentLayout, per_frame: Sequence[F64]) -> F64:
    """Returns the squared norm of each piece, float64 (pieces,).

    per_frame: squared norms by segment, for each frame in order, as `frame_codec.check_frame` returns them.
    """
    sums = np.zeros(len(fragment.pieces), np.float64)
    for span, squares in zip(fragment.frames, per_frame, strict=True):
        for segment, square in zip(span.segments, squares, strict=True):
            sums[segment.piece] += square
    return sums


def merge(
    fragment: FragmentLayout,
    state: FragmentState,
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    rule: OuterRule,
    published: F32,
) -> MergeResult:
    """Merges contributions into the next version of `state` and returns the new state and the published update.

    contributions: sorted by learner, all in one codec. The norm of each piece must be at most LARGEST_NORM, so that
    all sums are finite. weights: one per contribution, with a sum of at most 1. published: float32 (fragment.length,),
    receives the new theta_pub; it may be the array of the old theta_pub.
    The second pass changes theta and momentum in place. An error in the first pass leaves `state` unchanged. After an
    error in the second pass, the caller must discard `state`.
    """
    assert contributions, "a merge needs at least one contribution"
    assert len({contribution.codec for contribution in contributions}) == 1, "all contributions use the run's codec"
    learners = [contribution.learner for contribution in contributions]
    assert learners == sorted(learners), "contributions are sorted by learner"
    directed = np.array([piece.kind is MergeKind.DIRECTION and rule.heat > 0 for piece in fragment.pieces])
    factors = np.stack([_factors(directed, c, w) for c, w in zip(contributions, weights, strict=True)])
    given = _Given(contributions, fragment)
    combined_sq = norms_sq(fragment, [_combined_squares(given, span, factors) for span in fragment.frames])
    radii = np.zeros(len(fragment.pieces), np.float64)
    for contribution, weighs in zip(contributions, weights, strict=True):
        radii += weighs * contribution.scale * np.sqrt(contribution.norms_sq)
    scales = np.ones(len(fragment.pieces), np.float32)
    for index in np.flatnonzero(directed):
        norm = math.sqrt(combined_sq[index])
        scales[index] = radii[index] / norm if norm > CANCELLED else 0.0  # a sum without a direction adds nothing
    return _step(fragment, state, given, factors, scales, rule, part_of(weights), published)


class _Given:
    """The decompressed contents of a round's contributions, which both passes use.

    The second pass reuses the contents of the first pass if they take at most four bytes per parameter. Otherwise, the
    second pass reads the contents again.
    """

    def __init__(self, contributions: Sequence[Contribution], fragment: FragmentLayout) -> None:
        self._contributions = contributions
        self.codec = contributions[0].codec
        size = len(contributions) * sum(frame_codec.content_bytes(span, self.codec) for span in fragment.frames)
        self._kept: dict[int, list[Content]] | None = {} if size <= 4 * fragment.length else None

    def contents(self, span: FrameSpan) -> list[Content]:
        """Returns the contents of one frame, one per contribution."""
        found = self._kept.get(span.index) if self._kept else None
        if found is None:
            found = [contribution.content(span) for contribution in self._contributions]
            if self._kept is not None:
                self._kept[span.index] = found
        return found


def _factors(directed: NDArray[np.bool_], contribution: Contribution, weighs: float) -> F32:
    """Returns a contribution's factors, float32 (pieces,).

    directed: for each piece, whether it is merged by direction.
    """
    factors = np.full(len(directed), weighs * contribution.scale, np.float64)
    for index in np.flatnonzero(directed):
        norm = math.sqrt(contribution.norms_sq[index])
        factors[index] = weighs / norm if norm > SMALLEST_NORM else 0.0
    return factors.astype(np.float32)


def _combined_squares(given: _Given, span: FrameSpan, factors: F32) -> F64:
    """Runs the first pass over a frame. Returns the squared norm of the weighted sum, float64 (segments,).

    factors: float32 (contributions, pieces).
    """
    contents, squares = given.contents(span), np.empty(len(span.segments), np.float64)
    frame_squares(*_coded(contents, span, given.codec), frame_codec.lengths(span), _by_segment(factors, span), squares)
    return squares


def _step(
    fragment: FragmentLayout,
    state: FragmentState,
    given: _Given,
    factors: F32,
    scales: F32,
    rule: OuterRule,
    part: float,
    published: F32,
) -> MergeResult:
    """Runs the second pass: takes the Nesterov step, and computes the published update and the checksums.

    factors: float32 (contributions, pieces). scales: float32 (pieces,), for the weighted sum. part: fraction of an
    outer step, from 0 to 1.
    """
    frames = []
    theta_crc = 0
    theta_pub_crc = 0
    momentum_crc = 0
    rates = np.array([rule.lr, *rule.decay_and_push(part)], np.float32)
    memory = np.empty(max(frame_codec.content_bytes(span, rule.codec) for span in fragment.frames), np.uint8)
    for span in fragment.frames:
        frames.append(
            frame_codec.store(_step_frame(span, state, given, factors, scales, rates, published, memory, rule.codec))
        )
        theta_crc = frame_codec.vector_crc32c(state.theta[span.place], theta_crc)
        theta_pub_crc = frame_codec.vector_crc32c(published[span.place], theta_pub_crc)
        momentum_crc = frame_codec.vector_crc32c(state.momentum[span.place], momentum_crc)
    new = FragmentState(state.version + 1, state.theta, published, state.momentum)
    update = Update(new.version, tuple(frames), theta_pub_crc)
    return MergeResult(new, update, (theta_crc, theta_pub_crc, momentum_crc))


def _step_frame(
    span: FrameSpan,
    state: FragmentState,
    given: _Given,
    factors: F32,
    scales: F32,
    rates: F32,
    published: F32,
    memory: Content,
    kind: Codec,
) -> Content:
    """Runs the second pass over a frame. Returns the content of the frame's update, which is a view of `memory`.

    rates: the values lr, decay and push, float32 (3,). kind: the update's codec.
    """
    contents = given.contents(span)
    update = memory[: frame_codec.content_bytes(span, kind)]
    place = span.place
    sound = frame_step(
        *_coded(contents, span, given.codec),
        frame_codec.lengths(span),
        _by_segment(factors, span),
        _by_segment(scales[None], span)[0],
        rates,
        state.theta[place],
        state.momentum[place],
        state.theta_pub[place],
        published[place],
        *_coded([update], span, kind),
    )
    assert sound, "sums are finite, since norms are bounded"
    return update


def _coded(contents: Sequence[Content], span: FrameSpan, kind: Codec) -> tuple[I64, int, int]:
    """Returns the kernel arguments for contents: addresses, byte offset of the scales, and number of levels."""
    return addresses(contents), frame_codec.code_bytes(span, kind), LEVELS[kind]


def _by_segment(of_pieces: F32, span: FrameSpan) -> F32:
    """Converts values per piece (contributions, pieces) to values per segment (contributions, segments)."""
    return np.ascontiguousarray(of_pieces[:, [segment.piece for segment in span.segments]])


def addresses(contents: Sequence[Content]) -> I64:
    """Returns the memory addresses of contents, int64 (contents,). The caller must keep the contents alive."""
    return np.array([content.ctypes.data for content in contents], np.int64)


@dataclass(frozen=True, slots=True)
class _Zeros:
    """A contribution whose values are all 0, for `warm_up`."""

    codec: Codec
    learner: str = ""
    scale: float = 1.0

    @property
    def norms_sq(self) -> F64:
        return np.ones(1, np.float64)

    def content(self, span: FrameSpan) -> Content:
        return np.zeros(frame_codec.content_bytes(span, self.codec), np.uint8)


def warm_up() -> None:
    """Compiles every kernel that a core uses or loads it from the cache on disk."""
    frame_codec.warm_up()
    span = FrameSpan(0, 0, 1, (Segment(0, 0, 1),))
    fragment = FragmentLayout(0, 1, (Piece(0, 0, 1, 0, MergeKind.AVERAGE, ""),), (span,))
    zero = np.zeros(1, np.float32)
    merge(fragment, start(zero), [_Zeros(Codec.INT4)], [1.0], OuterRule(1.0, 0.0, Codec.INT4), zero.copy())
