"""Adoption loses or repeats no work of a learner, in any order of events."""

from __future__ import annotations

import numpy as np
import pytest
from atoll.fragments.adoption import Change, Fate, PreparedAnchor, PseudoGradient, Track
from atoll.fragments.segments import Coded, FragmentShape, change
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.learner.contents import values

N = 64
FRAGMENT = plan([TensorSpec("w", (N,), "float32", MergeKind.DIRECTION)], 1).fragments[0]
SHAPE = FragmentShape.of(FRAGMENT.whole, Codec.FLOAT32)


def coded(q: np.ndarray) -> Coded:
    """Returns the values, coded as float32."""
    return Coded.of((q.astype(np.float32).view(np.uint8),))


class Island:
    """One fragment of a learner, and its work as float64 sums for comparison."""

    def __init__(self, seed: int, *, keep: bool = True, narrow: bool = False) -> None:
        self.random = np.random.default_rng(seed)
        self.keep, self.narrow = keep, narrow
        anchor = self.random.standard_normal(N).astype(np.float32)
        self.lost = np.zeros(N, np.float32)  # values lost to rounding in the last adoption
        self.local = np.zeros(N, np.float32)
        self.write(anchor)
        self.track = Track(SHAPE, 3, anchor, 3)
        self.tokens = self.steps = 0
        self.displacement = np.zeros(N)
        self.merged = np.zeros(N)
        self.abandoned = np.zeros(N)
        self.in_flight: np.ndarray | None = None
        self.given_up = False  # whether the work in flight was dropped after it was taken

    def stored(self, values: np.ndarray) -> np.ndarray:
        """Returns the values as the parameters store them: float32, or a narrower type."""
        return values.astype(np.float16).astype(np.float32) if self.narrow else values.astype(np.float32)

    def write(self, values: np.ndarray) -> None:
        self.local = self.stored(values)
        self.lost = values - self.local

    @property
    def work(self) -> np.ndarray:
        """The outstanding work."""
        return self.track.anchor - (self.local + self.lost).astype(np.float64)

    def train(self) -> None:
        before = self.local.copy()
        self.local = self.stored(self.local + 0.01 * self.random.standard_normal(N))
        self.displacement += before.astype(np.float64) - self.local
        self.tokens += 10
        self.steps += 1

    def taken(self) -> PseudoGradient:
        values = self.local + self.lost
        return self.track.take(lambda: values, self.tokens, self.steps)

    def send(self) -> None:
        taken = self.taken()
        self.in_flight = (
            np.round(values(taken.coded, FRAGMENT, Codec.FLOAT32) * 64).astype(np.float32) / 64
        )  # a coarse codec

    def move(self, anchor: np.ndarray, version: int, fate: Fate) -> int:
        """Adopts an anchor, and stores the new values. Returns the dropped tokens."""
        keep = self.keep and not fate.drop
        old = self.track.anchor
        ahead = Change(old, fate.q, change(old, anchor, None, fate.q, SHAPE)) if self.random.random() < 0.5 else None
        newer = PreparedAnchor(0, version, anchor, fate, ahead)
        self.write(self.local + self.lost + self.track.change_to(newer) if keep else anchor)
        return self.track.adopt(newer, self.tokens, self.steps, keep=keep)

    def adopt(self, *, merged: bool, drop: bool = False) -> None:
        anchor = (self.track.anchor + 0.02 * self.random.standard_normal(N)).astype(np.float32)
        q = self.in_flight if merged else None
        outstanding = self.work
        self.move(anchor, self.track.version + 1, Fate(None if q is None else coded(q), drop))
        if merged or drop:
            self.in_flight = None
        if merged and not self.given_up:
            self.merged += q
        self.given_up &= self.in_flight is not None
        if drop or not self.keep:
            self.abandoned += outstanding - (q if merged else 0)

    def restore(self) -> None:
        """Resets the parameters after a write by other code."""
        self.abandoned += self.work
        self.given_up = self.in_flight is not None
        keep, self.keep = self.keep, False
        self.move(self.track.anchor, self.track.version, Fate())
        self.keep = keep


MOVES = ["train", "train", "send", "adopt", "merged", "drop", "refused", "restore"]
moves = st.lists(st.sampled_from(MOVES), max_size=60)


@given(moves=moves, seed=st.integers(0, 2**32), narrow=st.booleans())
@example(moves=["train", "send", "train", "restore", "train", "merged", "train"], seed=1, narrow=False)
@settings(max_examples=200, deadline=None)
def test_movement_is_merged_outstanding_or_abandoned(moves, seed, narrow):
    island = Island(seed, narrow=narrow)
    for move in moves:
        flying = island.track.flying is not None
        if move == "train":
            island.train()
        elif move == "send" and not flying:
            island.send()
        elif move == "adopt":
            island.adopt(merged=False)
        elif move == "merged" and flying:
            island.adopt(merged=True)
        elif move == "drop" and flying:
            island.adopt(merged=False, drop=True)
        elif move == "restore":
            island.restore()
        elif move == "refused" and flying:
            island.track.refused()
            island.in_flight, island.given_up = None, False
    total = island.merged + island.work + island.abandoned
    np.testing.assert_allclose(island.displacement, total, atol=2e-5)


def test_work_that_was_dropped_in_flight_but_merged_is_not_undone():
    island = Island(1)
    island.train()
    island.send()
    island.restore()
    island.adopt(merged=True)
    assert np.abs(island.work).max() < 1e-6, "the next contribution must not undo the merged work"


def test_quantisation_errors_are_sent_next_time():
    island = Island(1)
    island.train()
    island.send()
    island.adopt(merged=True)
    left = island.work.astype(np.float32)
    assert 0 < np.abs(left).max() <= 0.5 / 64 + 1e-6
    assert np.array_equal(values(island.taken().coded, FRAGMENT, Codec.FLOAT32), left)


def test_without_outstanding_work_the_values_are_the_anchor_up_to_one_rounding():
    island = Island(2)
    island.adopt(merged=False)
    np.testing.assert_allclose(island.local, island.track.anchor, rtol=2e-7, atol=1e-8)
    assert island.track.base_version == island.track.version


@pytest.mark.parametrize("merged", [True, False])
def test_tokens_dropped_in_flight_count_as_abandoned_only_if_not_merged(merged):
    island = Island(5)
    island.train()
    island.send()
    island.train()
    assert island.track.give_up(island.tokens, island.steps) == 10  # only tokens after the contribution was taken
    assert not island.track.later(island.steps)
    if merged:
        island.adopt(merged=True)
        assert island.track.refused() == 0
    else:
        assert island.track.refused() == 10
    assert island.track.steps_from == island.steps


def test_staleness_cannot_hide_behind_an_adoption():
    island = Island(3)
    island.train()
    island.adopt(merged=False)
    island.adopt(merged=False)
    assert (island.track.version, island.track.base_version) == (5, 3)
    island.send()
    island.adopt(merged=True)
    assert island.track.base_version == island.track.version == 6


def test_tokens_of_a_contribution_are_sent_again_only_after_a_refusal():
    island = Island(4)
    island.train()
    assert island.taken().tokens == 10
    island.track.refused()
    island.train()
    island.send()
    island.train()
    island.adopt(merged=True)
    last = island.taken()
    assert (last.tokens, last.steps) == (10, 1)


def test_overwrite_drops_outstanding_work_and_reports_its_tokens():
    island = Island(5, keep=False)
    island.train()
    island.send()
    island.train()
    assert island.move(island.track.anchor + 1, 9, Fate()) == 10  # the ten tokens in flight may still be merged
    assert np.array_equal(island.local, island.track.anchor)
    assert island.move(island.track.anchor + 1, 10, Fate(coded(np.ones(N)))) == 0
    assert island.track.tokens_from == 20


def test_narrow_parameters_do_not_send_the_rounding_of_their_anchor():
    island = Island(6, narrow=True)
    assert not np.array_equal(island.local, island.track.anchor)
    assert not values(island.taken().coded, FRAGMENT, Codec.FLOAT32).any()


def test_at_most_one_contribution_is_in_flight():
    island = Island(7)
    island.send()
    with pytest.raises(AssertionError, match="in flight"):
        island.send()


@given(
    moves=st.lists(st.sampled_from(["train", "send", "adopt", "merged", "drop", "refused"]), min_size=20, max_size=60),
    seed=st.integers(0, 2**32),
    keep=st.booleans(),
    ahead=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_every_token_is_merged_outstanding_or_abandoned_once(moves, seed, keep, ahead):
    """This holds in both adoption modes, and over several versions at a time."""
    island = Island(seed, keep=keep)
    track, merged, abandoned, flying = island.track, 0, 0, 0
    for move in moves:
        flown = track.flying is not None
        if move == "train":
            island.train()
        elif move == "send" and not flown:
            flying = island.taken().tokens
        elif move == "refused" and flown:
            abandoned += track.refused()
        elif move == "adopt" or (move in {"merged", "drop"} and flown):
            fate = Fate(coded(np.zeros(N)) if move == "merged" else None, drop=move == "drop")
            anchor, version = track.anchor + 1, track.version + ahead
            abandoned += island.move(anchor, version, fate)
            merged += flying if move == "merged" else 0
    undecided = flying if track.flying == (0, 0) else 0  # overwritten while in flight, with an unknown fate
    assert island.tokens == merged + abandoned + undecided + (island.tokens - track.tokens_from)
