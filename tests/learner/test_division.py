"""Ranks divide a fragment: takes and adoptions move each value to and from its owner, on every mesh."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from atoll.ranks.division import Division, Moves, divide, owned_runs
from atoll.ranks.tensor_part import Block, TensorPart, chunk
from atoll_wire.layout import layout
from atoll_wire.layout.layout import FragmentLayout, Layout, MergeKind, TensorSpec
from hypothesis import example, given, settings
from hypothesis import strategies as st

SHAPES = ((24, 16), (13, 7, 3), (5,), (), (1, 9), (40, 2))


def planned(fragments: int) -> Layout:
    kinds = itertools.cycle((MergeKind.AVERAGE, MergeKind.DIRECTION))
    specs = [TensorSpec(f"t{n}", shape, "float32", next(kinds)) for n, shape in enumerate(SHAPES)]
    with mock.patch.object(layout, "FRAME_PARAMETERS", 64):
        return layout.plan(specs, fragments)


def part(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> TensorPart:
    """Returns a part after cuts of (dimension, number, chunks). Dimensions that a tensor lacks are not cut."""
    ranges = [((0, size),) for size in shape]
    for dimension, number, chunks in cuts:
        if dimension < len(ranges):
            ranges[dimension] = chunk(ranges[dimension], number, chunks)
    return TensorPart(tuple(shape), tuple(ranges))


def of_mesh(sizes: tuple[int, int], dimensions: Sequence[tuple[int, int]]) -> list[list[TensorPart]]:
    """Returns the parts of all ranks of a mesh. dimensions: what each mesh dimension cuts, by tensor; 9: nothing."""
    found = []
    for first, second in itertools.product(range(sizes[0]), range(sizes[1])):
        cuts = [((one, first, sizes[0]), (two, second, sizes[1])) for one, two in dimensions]
        found.append([part(shape, cut) for shape, cut in zip(SHAPES, cuts, strict=True)])
    return found


def exchanged(sent: Sequence[np.ndarray], given: Sequence[Moves], taken: Sequence[Moves]) -> list[np.ndarray]:
    """Returns what each rank receives in an exchange like torch.distributed.all_to_all_single."""
    ranks = len(sent)
    assert [[m.counts[r] for m in given] for r in range(ranks)] == [list(m.counts) for m in taken]
    cuts = [np.split(buffer, np.cumsum(moves.counts)[:-1]) for buffer, moves in zip(sent, given, strict=True)]
    return [np.concatenate([cuts[sender][receiver] for sender in range(ranks)]) for receiver in range(ranks)]


def gathered(vector: np.ndarray, moves: Moves) -> np.ndarray:
    return np.concatenate([vector[:0], *(vector[p : p + n] for p, n in zip(moves.places, moves.lengths, strict=True))])


def scattered(buffer: np.ndarray, moves: Moves, length: int) -> np.ndarray:
    vector = np.full(length, np.nan)
    for start, place, n in zip(moves.starts, moves.places, moves.lengths, strict=True):
        assert np.isnan(vector[place : place + n]).all(), "a value must be received once"
        vector[place : place + n] = buffer[start : start + n]
    return vector


def local_vector(division: Division, parts: Sequence[TensorPart], tensors: Sequence[np.ndarray]) -> np.ndarray:
    flat = [
        tensor[np.ix_(*([i for r in ranges for i in range(*r)] for ranges in mine.ranges))].reshape(-1)
        for tensor, mine in zip(tensors, parts, strict=True)
    ]
    pieces = [flat[piece.tensor][piece.start : piece.start + piece.length] for piece in division.pieces]
    return np.concatenate([np.empty(0), *pieces])


def vector_of(fragment: FragmentLayout, tensors: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[p.tensor].reshape(-1)[p.start : p.start + p.length] for p in fragment.pieces])


meshes = st.tuples(st.integers(1, 5), st.integers(1, 3))
cut = st.sampled_from([0, 1, 2, 9])


@given(fragments=st.integers(1, 4), sizes=meshes, cuts=st.lists(st.tuples(cut, cut), min_size=6, max_size=6))
@settings(max_examples=150, deadline=None)
def test_values_reach_their_owners_and_return(fragments, sizes, cuts):
    parts, ranks = of_mesh(sizes, cuts), sizes[0] * sizes[1]
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])
    tensors = [np.arange(a, b, dtype=float).reshape(s) for a, b, s in zip(ends, ends[1:], SHAPES, strict=False)]
    for fragment in planned(fragments).fragments:
        divisions = [divide(fragment, parts, rank) for rank in range(ranks)]
        vector = vector_of(fragment, tensors)
        locals_ = [local_vector(d, mine, tensors) for d, mine in zip(divisions, parts, strict=True)]
        given_ = [d.given for d in divisions]
        sent = [gathered(mine, moves) for mine, moves in zip(locals_, given_, strict=True)]
        for division, buffer in zip(divisions, exchanged(sent, given_, [d.owned for d in divisions]), strict=True):
            run = division.run
            owned = scattered(buffer, division.owned, run.length)
            assert np.array_equal(owned, vector[run.offset : run.offset + run.length])
        changes = [vector[d.run.offset : d.run.offset + d.run.length] for d in divisions]
        spread = [d.spread for d in divisions]
        sent = [gathered(-change, moves) for change, moves in zip(changes, spread, strict=True)]
        for division, mine, buffer in zip(
            divisions, locals_, exchanged(sent, spread, [d.held for d in divisions]), strict=True
        ):
            assert np.array_equal(scattered(buffer, division.held, division.local_length), -mine)


runs = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=12)  # distance from the last run, length


@given(runs=runs)
@example([(1, 2), (1, 2), (1, 2), (0, 1), (2, 1), (1, 1), (2, 3)])
def test_grids_hold_the_runs_of_an_exchange(runs):
    lengths = np.array([length for _, length in runs], np.int64)
    places = np.cumsum([gap for gap, _ in runs], dtype=np.int64) + np.cumsum(lengths) - lengths
    for order in (places, places[::-1]):
        moves = Moves(order, lengths[:: 1 if order is places else -1], (int(lengths.sum()),))
        found = [
            (g.place + n * g.step, g.start + n * g.length, g.length) for g in moves.grids() for n in range(g.count)
        ]
        assert found == list(zip(moves.places, moves.starts, moves.lengths, strict=True))
        assert all(grid.step > 0 for grid in moves.grids())


def test_a_part_that_is_cut_along_its_columns_has_few_grids():
    specs = [TensorSpec("t", (100, 16), "float32", MergeKind.DIRECTION)]
    whole = layout.plan(specs, 1).fragments[0]
    parts = [[part((100, 16), [(1, number, 2)])] for number in range(2)]
    owned = max((divide(whole, parts, rank).owned for rank in (0, 1)), key=lambda moves: moves.size)
    assert len(owned.places) == 200
    assert len(owned.grids()) == 2


@given(fragments=st.integers(1, 4), ranks=st.integers(1, 70))
@settings(deadline=None)
def test_owners_have_nearly_equal_runs_of_all_frames(fragments, ranks):
    for fragment in planned(fragments).fragments:
        runs = owned_runs(fragment, ranks)
        frames = sorted(frame.index for run in runs for frame in run.frames)
        assert frames == [frame.index for frame in fragment.frames]
        longest = max(run.length for run in runs)
        assert longest <= fragment.length / ranks + max(frame.length for frame in fragment.frames)


def test_ranks_without_frames_differ_between_fragments():
    fragments, ranks = planned(4).fragments, 40
    owners = [{rank for rank, run in enumerate(owned_runs(fragment, ranks)) if run.frames} for fragment in fragments]
    assert len(set.union(*owners)) > 2 * max(map(len, owners)), "owners must differ between fragments"


@pytest.mark.parametrize("size", [1, 5, 12])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_chunks_are_those_of_torch(size, chunks):
    import torch

    cut = [tuple(each.tolist()) for each in torch.chunk(torch.arange(size), chunks)]
    mine = [tuple(i for r in chunk([(0, size)], number, chunks) for i in range(*r)) for number in range(chunks)]
    assert mine == cut + [()] * (chunks - len(cut))


@given(shape=st.lists(st.integers(0, 7), max_size=3), cuts=st.lists(st.tuples(cut, cut, cut), min_size=3, max_size=3))
@settings(max_examples=150, deadline=None)
def test_blocks_hold_the_values_of_the_part(shape, cuts):
    ranges = [chunk(chunk(((0, n),), a % 2, 2), b % 3, 1 + c % 4) for n, (a, b, c) in zip(shape, cuts, strict=False)]
    holed = [(*each, (n + 1, n + 3)) for each, n in zip(ranges, shape, strict=True)]  # as in a strided shard
    mine = TensorPart(tuple(n + 3 for n in shape), tuple(holed))
    whole = np.arange(np.prod(mine.shape, dtype=int)).reshape(mine.shape)
    found = np.full(mine.local_shape, -1)
    for block in mine.blocks():
        place, source = (
            tuple(slice(start, start + n) for start, n in zip(starts, block.sizes, strict=True))
            for starts in (block.at, block.offsets)
        )
        found[place] = whole[source]
    expected = np.full(whole.size, -1)
    for start, at, length in zip(*mine.runs(0, whole.size), strict=True):
        expected[at : at + length] = whole.reshape(-1)[start : start + length]
    assert found.reshape(-1).tolist() == expected[: mine.size].tolist()


def test_an_empty_tensor_has_a_block_but_an_empty_part_has_none():
    assert TensorPart.whole((3, 0)).blocks() == [Block((0, 0), (3, 0), (0, 0))]
    assert TensorPart((3, 2), ((), ((0, 2),))).blocks() == []
    assert TensorPart.whole(()).blocks() == [Block((), (), ())]
