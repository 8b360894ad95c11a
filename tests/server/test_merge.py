"""Merges match their equations in float64, and are deterministic, as replay and anchors require."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from atoll_server.merging import merge
from atoll_server.merging.merge import FragmentState
from atoll_server.rounds.outer_rule import OuterRule
from atoll_server.rounds.syncer_events import Cause
from atoll_server.settings import RunSettings
from atoll_wire.codec import frame_codec
from atoll_wire.codec.frame_codec import FrameError
from atoll_wire.layout.frame_spans import Codec, FrameSpan
from atoll_wire.layout.layout import FragmentLayout, MergeKind, TensorSpec, plan

RULE = OuterRule(lr=0.9, momentum=0.5, codec=Codec.INT4)


@dataclass
class InMemory:
    """A contribution in memory."""

    learner: str
    codec: Codec
    frames: list[bytes]
    norms_sq: np.ndarray
    scale: float = 1.0  # factor that clips the contribution

    def content(self, span: FrameSpan) -> frame_codec.Content:
        return frame_codec.decompress(self.frames[span.index], span, self.codec)


def fragment() -> FragmentLayout:
    tensors = [
        TensorSpec("embedding", (40, 16), "float32", MergeKind.AVERAGE),
        TensorSpec("large", (1100, 500), "float32", MergeKind.DIRECTION),  # more than one frame
        TensorSpec("norm", (33,), "float32", MergeKind.DIRECTION),
    ]
    return plan(tensors, 1).fragments[0]


FRAGMENT = fragment()


def contribution(learner: str, seed: int, scale: float = 1e-3, kind: Codec = Codec.FLOAT32) -> InMemory:
    vector = (np.random.default_rng(seed).standard_normal(FRAGMENT.length) * scale).astype(np.float32)
    frames = [frame_codec.encode_frame(vector, span, kind) for span in FRAGMENT.frames]
    checked = [frame_codec.check_frame(p, s, kind)[1] for p, s in zip(frames, FRAGMENT.frames, strict=True)]
    return InMemory(learner, kind, frames, merge.norms_sq(FRAGMENT, checked))


def values(given: InMemory) -> np.ndarray:
    out = np.empty(FRAGMENT.length, np.float32)
    for span, payload in zip(FRAGMENT.frames, given.frames, strict=True):
        frame_codec.decode_frame(payload, span, given.codec, out)
    return out.astype(np.float64)


def state(seed: int = 9) -> FragmentState:
    random = np.random.default_rng(seed)
    theta = random.standard_normal(FRAGMENT.length).astype(np.float32)
    return FragmentState(3, theta, theta.copy(), (random.standard_normal(FRAGMENT.length) * 1e-3).astype(np.float32))


def copy(of: FragmentState) -> FragmentState:
    return FragmentState(of.version, of.theta.copy(), of.theta_pub.copy(), of.momentum.copy())


def run(begin: FragmentState, contributions, weights, rule=RULE) -> merge.MergeResult:
    return merge.merge(FRAGMENT, begin, contributions, weights, rule, begin.theta_pub)


def expected_delta(contributions, weights) -> np.ndarray:
    """Returns the average in float64: radial-directional per piece, but plain for the embedding."""
    delta = np.zeros(FRAGMENT.length)
    for piece in FRAGMENT.pieces:
        place = slice(piece.offset, piece.offset + piece.length)
        parts = [values(c)[place] for c in contributions]
        if piece.kind is MergeKind.AVERAGE:
            delta[place] = sum(w * v for w, v in zip(weights, parts, strict=True))
            continue
        phi = [v / np.linalg.norm(v) if np.linalg.norm(v) else v for v in parts]
        direction = sum(w * p for w, p in zip(weights, phi, strict=True))
        radius = sum(w * np.linalg.norm(v) for w, v in zip(weights, parts, strict=True))
        norm = np.linalg.norm(direction)
        delta[place] = radius * direction / norm if norm else 0.0
    return delta


@pytest.mark.parametrize("kind", [Codec.FLOAT32, Codec.INT4])
def test_a_merge_matches_its_equations(kind):
    given = [contribution("a", 1, 1e-3, kind), contribution("b", 2, 3e-3, kind), contribution("c", 3, 1e-4, kind)]
    weights, begin = [0.5, 0.3, 0.2], state()
    before = copy(begin)
    merged = run(begin, given, weights)
    new, update = merged.state, merged.update
    delta = expected_delta(given, weights)
    momentum = 0.5 * before.momentum.astype(np.float64) + delta
    theta = before.theta - 0.9 * (delta + 0.5 * momentum)
    assert new.version == update.version == 4
    assert merged.checksums == new.checksums()
    np.testing.assert_allclose(new.momentum, momentum, rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(new.theta, theta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", Codec)
def test_a_learner_that_adds_the_update_holds_the_published_parameters_bit_by_bit(kind):
    begin = state()
    anchor = begin.theta_pub.copy()
    merged = run(begin, [contribution("a", 1, kind=kind)], [1.0], OuterRule(0.9, 0.5, kind))
    new, update = merged.state, merged.update
    for span, payload in zip(FRAGMENT.frames, update.frames, strict=True):
        frame_codec.decode_add(payload, span, kind, np.ones(len(span.segments), np.float32), anchor)
    assert anchor.tobytes() == new.theta_pub.tobytes()
    assert update.crc32c == frame_codec.vector_crc32c(anchor)


@pytest.mark.parametrize(("kind", "levels"), [(Codec.FLOAT32, 2**20), (Codec.INT8, 127), (Codec.INT4, 7)])
def test_published_parameters_differ_from_exact_ones_only_by_the_codecs_error(kind, levels):
    begin = state()
    before = begin.theta_pub.copy()
    new = run(begin, [contribution("a", 1)], [1.0], OuterRule(0.9, 0.5, kind)).state
    largest = np.abs(new.theta - before).max()
    assert np.abs(new.theta - new.theta_pub).max() <= largest / levels


def test_published_parameters_follow_the_exact_ones_over_many_merges():
    current = state()
    for step in range(10):
        current = run(current, [contribution("a", step), contribution("b", 50 + step)], [0.5, 0.5]).state
    last_step = 0.9 * 1e-3 * 3  # only the last update's error remains; earlier ones are fed back
    assert np.abs(current.theta - current.theta_pub).max() < last_step


@pytest.mark.parametrize("scale", [1e-44, 1e-36, 1e9])
def test_every_accepted_contribution_gives_finite_parameters(scale):
    """The contributions include the smallest and the largest allowed norms, alone or among others."""
    given = [contribution("a", 1, scale), contribution("b", 2)]
    assert np.sqrt(given[0].norms_sq).max() <= merge.LARGEST_NORM
    for contributions, weights in ((given, [0.5, 0.5]), (given[:1], [1.0])):
        new = run(state(), contributions, weights).state
        for vector in (new.theta, new.theta_pub, new.momentum):
            assert np.isfinite(vector).all()


def test_directions_that_cancel_do_not_amplify_rounding_noise():
    one = contribution("a", 1)
    other = InMemory("b", one.codec, [], one.norms_sq)
    vector = -values(one).astype(np.float32)
    other.frames = [frame_codec.encode_frame(vector, span, one.codec) for span in FRAGMENT.frames]
    begin = state()
    new = run(
        FragmentState(3, begin.theta.copy(), begin.theta_pub, np.zeros_like(begin.momentum)), [one, other], [0.5, 0.5]
    ).state
    assert np.abs(new.theta - begin.theta).max() < 1e-6


def test_the_same_merge_gives_the_same_bytes():
    given = [contribution("a", 1, kind=Codec.INT4), contribution("b", 2, kind=Codec.INT4)]
    first, second = run(state(), given, [0.4, 0.6]), run(state(), given, [0.4, 0.6])
    assert first.state.checksums() == second.state.checksums()
    assert first.update == second.update


def test_readers_of_published_parameters_are_not_disturbed_by_a_merge():
    given, begin = [contribution("a", 1, kind=Codec.INT4)], state()
    in_place, before = run(copy(begin), given, [1.0]), begin.theta_pub.copy()
    beside = merge.merge(FRAGMENT, begin, given, [1.0], RULE, np.full(FRAGMENT.length, np.nan, np.float32))
    assert beside.state.checksums() == in_place.state.checksums()
    assert np.array_equal(begin.theta_pub, before)


def test_contributions_beyond_the_kept_ones_are_read_twice():
    given = [contribution(f"{n}", n, kind=Codec.INT4) for n in range(9)]
    few = merge._Given(given[:7], FRAGMENT)
    assert few.contents(FRAGMENT.frames[0]) is few.contents(FRAGMENT.frames[0])
    many = merge._Given(given, FRAGMENT)
    assert many.contents(FRAGMENT.frames[0]) is not many.contents(FRAGMENT.frames[0])
    new = run(state(), given, [1 / 9] * 9)
    delta = expected_delta(given, [1 / 9] * 9)
    begin = state()
    expected = begin.theta - 0.9 * (delta + 0.5 * (0.5 * begin.momentum + delta))
    np.testing.assert_allclose(new.state.theta, expected, rtol=1e-4, atol=1e-7)


def test_contributions_out_of_order_raise_an_error():
    with pytest.raises(AssertionError, match="sorted by learner"):
        run(state(), [contribution("b", 1), contribution("a", 2)], [0.5, 0.5])


def test_a_broken_frame_leaves_the_state_untouched():
    broken = contribution("b", 2)
    broken.frames[-1] = broken.frames[-1][:-4]
    begin = state()
    before = copy(begin)
    with pytest.raises(FrameError):
        run(begin, [contribution("a", 1), broken], [0.5, 0.5])
    assert begin.checksums() == before.checksums()


def test_a_contribution_of_zeros_changes_no_direction():
    zeros = contribution("z", 1, scale=0.0)
    assert (zeros.norms_sq == 0).all()
    begin = state()
    before = copy(begin)
    new = run(begin, [zeros], [1.0], OuterRule(0.9, 0.0, Codec.FLOAT32)).state
    assert np.array_equal(new.theta, before.theta)


def test_radial_directional_averaging_does_not_shrink_orthogonal_work():
    given, weights = [contribution(name, seed) for seed, name in enumerate("abcd")], [0.25] * 4
    piece = next(p for p in FRAGMENT.pieces if p.name == "large")
    place = slice(piece.offset, piece.offset + piece.length)
    begin = state()
    begin.momentum[:] = 0
    new = run(begin, given, weights, OuterRule(1.0, 0.0, Codec.FLOAT32)).state
    mean_norm = np.mean([np.linalg.norm(values(c)[place]) for c in given])
    assert np.linalg.norm(new.momentum[place].astype(np.float64)) == pytest.approx(mean_norm, rel=1e-4)


def test_after_all_learners_left_the_model_is_their_mean():
    rule = OuterRule.of(RunSettings(codec=Codec.FLOAT32), 100, Cause.LEFT, 0)
    given, weights = [contribution(name, seed) for seed, name in enumerate("abcd")], [0.4, 0.3, 0.2, 0.1]
    begin = state()
    before = copy(begin)
    new = run(begin, given, weights, rule).state
    had = [before.theta - c.scale * values(c) for c in given]
    np.testing.assert_allclose(new.theta, np.average(had, axis=0, weights=weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.LEFT])
def test_while_a_learner_trains_the_runs_rule_applies(cause):
    run = RunSettings(outer_lr=0.3, outer_momentum=0.8, outer_warm_up=10, codec=Codec.INT8)
    assert OuterRule.of(run, 5, cause, 10**12) == OuterRule(0.3, 0.4, Codec.INT8, 1.0, 0.5, 5)


def test_over_the_last_part_of_the_tokens_outer_steps_become_plain_means():
    run = RunSettings(outer_lr=0.6, outer_momentum=0.8, outer_warm_up=0, total_tokens=1000, outer_cool_down=0.2)
    rules = [OuterRule.of(run, 50, Cause.ALL_ANSWERED, tokens) for tokens in (800, 900, 1000, 1100)]
    assert [rule.heat for rule in rules] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert [rule.lr for rule in rules] == pytest.approx([0.6, 0.8, 1.0, 1.0])
    assert [rule.momentum for rule in rules] == pytest.approx([0.8, 0.4, 0.0, 0.0])
    assert OuterRule.of(run.changed(outer_cool_down=0.0), 50, Cause.ALL_ANSWERED, 999).heat == 1.0


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_work_moves_the_parameters_equally_far_in_one_merge_or_in_parts(momentum):
    rule = OuterRule(0.7, momentum, Codec.INT4)

    def moved(part: float) -> float:
        decay, push = rule.decay_and_push(part)
        buffer = theta = 0.0
        for merged in range(round(200 / part)):
            delta = part if merged < 1 / part else 0.0
            buffer = decay * buffer + delta
            theta += rule.lr * (delta + push * buffer)
        return theta

    assert moved(1.0) == pytest.approx(0.7 / (1 - momentum))
    assert moved(0.25) == pytest.approx(moved(1.0))
    assert rule.decay_and_push(1.0) == pytest.approx((momentum, momentum))


def test_a_part_of_an_outer_step_reduces_momentum_by_that_part():
    given, begin = [contribution("a", 1), contribution("b", 2)], state()
    before = copy(begin)
    new = run(begin, given, [0.125, 0.125]).state
    delta = expected_delta(given, [0.125, 0.125])
    decay = 0.5**0.25
    momentum = decay * before.momentum.astype(np.float64) + delta
    np.testing.assert_allclose(new.momentum, momentum, rtol=2e-5, atol=1e-9)
    push = 0.5 * (1 - decay) / (1 - 0.5)
    np.testing.assert_allclose(new.theta, before.theta - 0.9 * (delta + push * momentum), rtol=1e-6, atol=1e-6)


def test_weights_follow_tokens_pace_and_staleness():
    assert merge.weight(800, 10, 0, 0.5) == 800 * 80
    assert merge.weight(800, 10, 4, 0.5) == pytest.approx(800 * 80 / 2)
    assert merge.weight(800, 10, 0.9, 0.5) == 800 * 80, "a staleness below one outer step must not reduce the weight"
    assert merge.weight(800, 10, 4, 0.0) == 800 * 80
