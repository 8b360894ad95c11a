"""Learners with several ranks lose and duplicate no work, and adopt the same bits as a single-process learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from atoll.boundary.local_parameters import LocalParameters
from atoll.device.device_coder import DeviceCoder
from atoll.fragments import segments
from atoll.fragments.adoption import Change, Fate, PreparedAnchor, PseudoGradient
from atoll.fragments.segments import Coder, FragmentShape
from atoll.ranks.division import divide
from atoll.ranks.rank_group import ALONE
from atoll.ranks.tensor_part import TensorPart
from atoll.transfers.partial_fetch import PartialFetch
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import joined
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FrameRun, Layout
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.learner.test_division import SHAPES, of_mesh, planned, vector_of
from tests.simulation.ranks import Hub, SimulatedRanks

CODEC = Codec.INT4
LAYOUT = planned(4)
WHOLE = [[TensorPart.whole(shape) for shape in SHAPES]]
ROUNDING = 2e-5
ON_CPU_TENSORS = DeviceCoder(torch.device("cpu"))


class Rank:
    """One rank of a learner. parts: of each tensor, by rank and tensor.

    merged, abandoned: the fates of its frames' work, in float64. in_flight: the rank's last sent work.
    """

    def __init__(self, layout: Layout, parts: Sequence[Sequence[TensorPart]], number: int, hub: Hub | None) -> None:
        self.number, self.parts = number, parts[number]
        self.parameters = [nn.Parameter(torch.zeros(part.local_shape), requires_grad=False) for part in self.parts]
        self.divisions = [divide(fragment, parts, number) for fragment in layout.fragments]
        self.ranks: Any = ALONE if hub is None else SimulatedRanks(hub, number)
        self.local: LocalParameters
        self.in_flight: PseudoGradient | None = None

    def enter(self, anchors: Sequence[np.ndarray], fragment: int, coder: DeviceCoder | None) -> None:
        runs = [division.run for division in self.divisions]
        mine = [anchor[run.offset : run.offset + run.length] for anchor, run in zip(anchors, runs, strict=True)]
        prepared = [PreparedAnchor(number, 3, anchor.copy(), Fate()) for number, anchor in enumerate(mine)]
        self.coder: Coder = coder or segments
        self.local = LocalParameters(
            self.parameters, self.divisions, CODEC, prepared, keep=True, ranks=self.ranks, coder=coder
        )
        self.run: FrameRun = runs[fragment]
        self.merged, self.abandoned = np.zeros(self.run.length), np.zeros(self.run.length)

    def places(self, tensor: int) -> Any:
        ranges = self.parts[tensor].ranges
        return np.ix_(*([index for pair in each for index in range(*pair)] for each in ranges))

    def mine(self, vector: np.ndarray) -> np.ndarray:
        """Returns the part of a fragment's vector that this rank owns."""
        return vector[self.run.offset : self.run.offset + self.run.length]

    def sent(self) -> np.ndarray:
        """Returns the values of the contribution in flight."""
        assert self.in_flight is not None, "a contribution is in flight"
        out = np.zeros(self.run.length, np.float32)
        for span, content in zip(self.run.frames, self.in_flight.coded.contents, strict=True):
            frame_codec.content_add(content, span, CODEC, np.ones(len(span.segments), np.float32), out)
        return out


class Island:
    """One fragment of a learner that is divided among ranks. coder: None if they code in host memory."""

    def __init__(
        self,
        parts: Sequence[Sequence[TensorPart]],
        fragment: int,
        anchors: Sequence[np.ndarray],
        coder: DeviceCoder | None = None,
    ) -> None:
        self._hub = Hub(len(parts))
        hub = self._hub if len(parts) > 1 else None
        self.place, self.number = LAYOUT.fragments[fragment], fragment
        self.ranks = [Rank(LAYOUT, parts, number, hub) for number in range(len(parts))]
        self._together(lambda rank: rank.enter(anchors, fragment, coder))
        self.trained, self.steps, self.given_up = np.zeros(self.place.length), 0, False

    def _together(self, work: Callable[[Rank], object]) -> None:
        """Calls a function, which waits for the other ranks, on all ranks at the same time."""
        self._hub.together([partial(work, rank) for rank in self.ranks])

    def values(self) -> np.ndarray:
        """Returns the parameters of all ranks together. Copies must be equal."""
        tensors = [np.full(shape, np.nan, np.float32) for shape in SHAPES]
        for rank in self.ranks:
            for number, (tensor, parameter) in enumerate(zip(tensors, rank.parameters, strict=True)):
                places, own = rank.places(number), parameter.detach().numpy()
                before = np.reshape(tensor[places], own.shape)
                assert (np.isnan(before) | (before == own)).all(), "copies of a parameter must be equal"
                tensor[places] = np.reshape(own, np.shape(tensor[places]))
        return vector_of(self.place, tensors)

    def of_owners(self, each: Callable[[Rank], np.ndarray]) -> np.ndarray:
        """Returns the parts of all owners, joined in the order of their frames."""
        owners = sorted((rank for rank in self.ranks if rank.run.length), key=lambda rank: rank.run.offset)
        return np.concatenate([each(rank) for rank in owners])

    def anchor(self) -> np.ndarray:
        return self.of_owners(lambda rank: rank.local.tracks[self.number].anchor)

    @property
    def flying(self) -> bool:
        return self.ranks[0].local.tracks[self.number].flying is not None

    # ------------------------------------------------------------------------------ events

    def train(self, changes: Sequence[np.ndarray]) -> None:
        before = self.values()
        for rank in self.ranks:
            for number, (change, parameter) in enumerate(zip(changes, rank.parameters, strict=True)):
                mine = np.reshape(change[rank.places(number)], parameter.shape)
                parameter.add_(torch.from_numpy(np.asarray(mine)))
        self.trained += before.astype(np.float64) - self.values()
        self.steps += 1

    def send(self) -> None:
        for rank in self.ranks:
            rank.in_flight = rank.local.take(self.number, 10 * self.steps, self.steps)

    def adopt(self, payloads: Sequence[bytes], ahead: bool, *, merged: bool, drop: bool) -> int:
        """Adopts the next version. payloads: of its update, by frame. ahead: whether the agent computes the change.

        Returns the checksum of all parts of the anchor.
        """
        checksums, values = [], self.values()
        for rank in self.ranks:
            track = rank.local.tracks[self.number]
            fetch = PartialFetch(rank.run, CODEC, track.version + 1)
            header = pb.FetchHeader(version=track.version + 1, codec=int(CODEC))  # type: ignore[arg-type]
            for span in rank.run.frames:
                fetch.took(header, pb.Frame(index=span.index, payload=payloads[span.index]))
            decoded = fetch.decoded(track.anchor)
            assert decoded is not None
            anchor = decoded.values
            checksums.append((rank.run.first, decoded.checksum, anchor.nbytes))
            q = rank.in_flight.coded if merged and rank.in_flight is not None else None
            work = track.anchor.astype(np.float64) - rank.mine(values)
            if merged and not self.given_up:
                rank.merged += rank.sent()
                work -= rank.sent()
            if drop:
                rank.abandoned += work
            added = rank.coder.change(track.anchor, anchor, decoded.update, q, FragmentShape.of(rank.run, CODEC))
            known = Change(track.anchor, q, added) if ahead else None
            rank.local.begin(PreparedAnchor(self.number, track.version + 1, anchor, Fate(q, drop), known))
        for rank in self.ranks:
            rank.local.finish(self.number, 10 * self.steps, self.steps)
        self.given_up &= self.flying
        return joined((checksum, size) for _, checksum, size in sorted(checksums) if size)

    def refuse(self) -> None:
        for rank in self.ranks:
            rank.local.tracks[self.number].refused()
        self.given_up = False

    def restore(self) -> None:
        """Resets the parameters after a write by other code."""
        values = self.values()
        for rank in self.ranks:
            rank.abandoned += rank.local.tracks[self.number].anchor.astype(np.float64) - rank.mine(values)
        self.given_up = self.flying
        self._together(lambda rank: rank.local.restore(self.number, 10 * self.steps, self.steps))

    @property
    def has_work(self) -> bool:
        """Whether the learner took steps since its last merge. Learners decline rounds without work."""
        return self.ranks[0].local.tracks[self.number].steps_from < self.steps

    # ------------------------------------------------------------------------------ conservation

    def check(self) -> None:
        work = self.anchor().astype(np.float64) - self.values()
        fates = self.of_owners(lambda rank: rank.merged + rank.abandoned)
        np.testing.assert_allclose(self.trained, fates + work, atol=ROUNDING)


MOVES = ["train", "train", "send", "adopt", "merged", "drop", "refused", "restore"]
meshes = st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
cut = st.sampled_from([0, 1, 2, 9])
cuts = st.lists(st.tuples(cut, cut), min_size=len(SHAPES), max_size=len(SHAPES))
EXAMPLE = ["train", "send", "train", "restore", "train", "merged", "train", "send", "merged", "train", "drop"]


@given(
    mesh=meshes, cuts=cuts, fragment=st.integers(0, 3), moves=st.lists(st.sampled_from(MOVES), max_size=25),
    seed=st.integers(0, 2**32), coder=st.sampled_from([None, ON_CPU_TENSORS]),
)  # fmt: skip
@example(mesh=(2, 2), cuts=[(0, 1)] * len(SHAPES), fragment=0, moves=EXAMPLE, seed=1, coder=None)
@example(mesh=(4, 1), cuts=[(9, 9)] * len(SHAPES), fragment=1, moves=EXAMPLE, seed=2, coder=None)
@example(mesh=(2, 2), cuts=[(0, 1)] * len(SHAPES), fragment=0, moves=EXAMPLE, seed=1, coder=ON_CPU_TENSORS)
@example(mesh=(4, 1), cuts=[(9, 9)] * len(SHAPES), fragment=1, moves=EXAMPLE, seed=2, coder=ON_CPU_TENSORS)
@settings(max_examples=100, deadline=None)
def test_work_of_all_ranks_is_merged_outstanding_or_dropped(mesh, cuts, fragment, moves, seed, coder):
    """Ranks that code on a device or on the host give the same bits as one process on the host."""
    random = np.random.default_rng(seed)
    anchors = [random.standard_normal(each.length).astype(np.float32) for each in LAYOUT.fragments]
    island, one = Island(of_mesh(mesh, cuts), fragment, anchors, coder), Island(WHOLE, fragment, anchors)
    for move in moves:
        changes = [(0.01 * random.standard_normal(shape)).astype(np.float32) for shape in SHAPES]
        update = (0.02 * random.standard_normal(island.place.length)).astype(np.float32)
        payloads = [frame_codec.encode_frame(update, span, CODEC) for span in island.place.frames]
        ahead, flying, checksums = bool(random.integers(2)), one.flying, set[int]()
        for each in (island, one):
            if move == "train":
                each.train(changes)
            elif move == "send" and not flying and each.has_work:
                each.send()
            elif move == "adopt" or (move in {"merged", "drop"} and flying):
                checksums.add(each.adopt(payloads, ahead, merged=move == "merged", drop=move == "drop"))
            elif move == "refused" and flying:
                each.refuse()
            elif move == "restore":
                each.restore()
            each.check()
        assert len(checksums) < 2, "the owners' parts must have the whole anchor's checksum"
        assert island.anchor().tobytes() == one.anchor().tobytes()
        assert island.values().tobytes() == one.values().tobytes()
