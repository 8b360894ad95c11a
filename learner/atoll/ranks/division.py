"""PURE: the division of a fragment among the ranks of a learner.

A fragment's values are divided among the ranks in two ways:

- As parameters: the model's placements decide which part of each tensor a rank holds.
- As frames: each rank owns consecutive frames, or none if the fragment has fewer frames than ranks. The owner keeps the
  anchor of its frames, and encodes and transfers these frames.

This module computes which values the ranks exchange. To take a pseudo-gradient, ranks send their parameters to the
owners of the frames. To adopt an anchor, the owners send the changes back.

A rank sends all values for another rank in one message, in the fragment's order. If several ranks hold the same part of
a tensor, one of them sends it and all of them receive it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from atoll_wire.layout.layout import FragmentLayout, FrameRun, Layout, Piece

from atoll.ranks.tensor_part import I64, TensorPart


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """Consecutive elements of one tensor on a rank.

    tensor: number of the tensor in the layout.
    start: position of the first element in the rank's part of the tensor, as a flat array.
    offset: position of the first element in the rank's local vector of the fragment.
    """

    tensor: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Grid:
    """`count` runs of `length` values each, at equal distances. One strided copy moves them all.

    place: position of the first run in the rank's own vector. step: distance between the starts of the runs in that
    vector. start: position of the first run in the message buffer, where the runs are consecutive.
    """

    place: int
    step: int
    start: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Moves:
    """The values that one rank sends or receives in one exchange with all ranks.

    places, lengths: int64 (runs,), the position of each run in the rank's own vector, and the run's length, in the
    order of the message buffer. counts: number of values to or from each rank.
    """

    places: I64
    lengths: I64
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of values in the message buffer."""
        return sum(self.counts)

    @property
    def starts(self) -> I64:
        """The position of each run in the message buffer."""
        return np.cumsum(self.lengths) - self.lengths

    def is_all_of(self, length: int) -> bool:
        """Returns whether the message buffer is the same as the rank's whole vector. length: the vector's length."""
        return len(self.places) == 1 and self.places[0] == 0 and self.lengths[0] == length

    def grids(self) -> list[Grid]:
        """Returns the runs in grids. A part that is cut along its columns has one run per row, but only a few grids."""
        steps, found, run, runs = np.diff(self.places), list[Grid](), 0, len(self.places)
        steps[(self.lengths[1:] != self.lengths[:-1]) | (steps < 0)] = 0  # 0: the two runs cannot be in one grid
        ends = np.append(np.flatnonzero(steps[1:] != steps[:-1]) + 1, runs - 1)  # last runs of series of equal steps
        starts = self.starts
        while run < runs:
            step = int(steps[run]) if run < runs - 1 else 0
            count = int(ends[np.searchsorted(ends, run, side="right")]) - run + 1 if step else 1
            place, start, length = (int(each[run]) for each in (self.places, starts, self.lengths))
            found.append(Grid(place, step or length, start, count, length))
            run += count
        return found


@dataclass(frozen=True, slots=True)
class Division:
    """One rank's share of a fragment: its parts of tensors, its frames, and the values that it exchanges.

    run: the frames that the rank owns. It is empty on some ranks if there are more ranks than frames.
    pieces: the rank's parts of the fragment's tensors. Together, they form the rank's local vector.
    given, owned: to take a pseudo-gradient, the rank sends `given` from its local vector and receives `owned` into the
    run's vector.
    spread, held: to adopt an anchor, the rank sends `spread` from the run's vector and receives `held` into its local
    vector.
    """

    fragment: FragmentLayout
    run: FrameRun
    pieces: tuple[LocalPiece, ...]
    given: Moves
    owned: Moves
    spread: Moves
    held: Moves

    @property
    def local_length(self) -> int:
        """The number of values in the local vector."""
        return sum(piece.length for piece in self.pieces)


def owned_runs(fragment: FragmentLayout, ranks: int) -> list[FrameRun]:
    """Returns the consecutive frames that each rank owns, by rank. The runs have nearly equal lengths.

    The rank that owns the first frames differs between fragments, because otherwise a rank might own no frame at all.
    """
    middles = [(frame.offset + frame.length / 2) * ranks / fragment.length for frame in fragment.frames]
    edges = [bisect_right(middles, float(number)) for number in range(ranks)]
    edges = [0, *edges[1:], len(middles)]
    runs = [FrameRun(fragment, 0, 0, 0, ())] * ranks
    for number in range(ranks):
        first, stop = edges[number], edges[number + 1]
        if first < stop:
            runs[(number + fragment.index) % ranks] = fragment.run(first, stop - first)
    return runs


@dataclass(frozen=True, slots=True)
class Owners:
    """The assignment of frames to ranks. rank: number of this rank. size: number of ranks."""

    rank: int = 0
    size: int = 1

    def run(self, fragment: FragmentLayout) -> FrameRun:
        """Returns the consecutive frames that this rank owns. The run may be empty."""
        return owned_runs(fragment, self.size)[self.rank]


def undivided(layout: Layout) -> list[Division]:
    """Returns the divisions for a single-process learner, which holds all parameters and owns all frames."""
    whole = [[TensorPart.whole(tensor.shape) for tensor in layout.tensors]]
    return [divide(fragment, whole, 0) for fragment in layout.fragments]


def divide(fragment: FragmentLayout, parts: Sequence[Sequence[TensorPart]], rank: int) -> Division:
    """Returns a rank's division of a fragment. parts: every rank's part of each tensor, by rank and tensor."""
    runs = owned_runs(fragment, len(parts))
    holders = [_holders(parts, piece.tensor) for piece in fragment.pieces]
    pieces, given, held = _as_holder(fragment, holders, runs, parts[rank], rank)
    owned, spread = _as_owner(fragment, holders, runs[rank], len(parts), rank)
    return Division(fragment, runs[rank], pieces, given, owned, spread, held)


def _holders(parts: Sequence[Sequence[TensorPart]], tensor: int) -> dict[TensorPart, list[int]]:
    """Returns the ranks that hold each part of a tensor."""
    found: dict[TensorPart, list[int]] = {}
    for rank, mine in enumerate(parts):
        found.setdefault(mine[tensor], []).append(rank)
    return found


def _sender(holders: Sequence[int], owner: int) -> int:
    """Returns the rank that sends a part to an owner: the owner itself if it holds the part, else another holder."""
    return owner if owner in holders else holders[owner % len(holders)]


class _Sides:
    """Collects the runs of one exchange, by the rank that they come from or go to."""

    def __init__(self, ranks: int) -> None:
        self._found: list[list[tuple[I64, I64]]] = [[] for _ in range(ranks)]

    def add(self, rank: int, places: I64, lengths: I64) -> None:
        self._found[rank].append((places, lengths))

    def moves(self, edges: Sequence[int] = ()) -> Moves:
        """Returns all runs. Adjacent runs are joined, unless the later one starts at a position in `edges`."""
        flat = [each for found in self._found for each in found]
        none = np.empty(0, np.int64)
        counts = tuple(sum(int(lengths.sum()) for _, lengths in found) for found in self._found)
        places = np.concatenate([none, *(places for places, _ in flat)])
        lengths = np.concatenate([none, *(lengths for _, lengths in flat)])
        return Moves(*_joined(places, lengths, edges), counts)


def _joined(places: I64, lengths: I64, edges: Sequence[int]) -> tuple[I64, I64]:
    if not len(places):
        return places, lengths
    begins = (places[1:] != places[:-1] + lengths[:-1]) | np.isin(places[1:], edges)
    first = np.flatnonzero(np.concatenate([[True], begins]))
    return places[first], np.add.reduceat(lengths, first)


def _as_holder(
    fragment: FragmentLayout,
    holders: Sequence[dict[TensorPart, list[int]]],
    runs: Sequence[FrameRun],
    mine: Sequence[TensorPart],
    rank: int,
) -> tuple[tuple[LocalPiece, ...], Moves, Moves]:
    given, held, pieces, offset = _Sides(len(runs)), _Sides(len(runs)), list[LocalPiece](), 0
    for piece, known in zip(fragment.pieces, holders, strict=True):
        part = mine[piece.tensor]
        _, positions, lengths = part.runs(piece.start, piece.start + piece.length)
        if not len(positions):
            continue
        first, length = int(positions[0]), int(lengths.sum())
        pieces.append(LocalPiece(piece.tensor, first, length, offset))
        for owner, run in enumerate(runs):
            if run.frames:
                _, positions, lengths = part.runs(*_overlap(piece, run))
                places = positions - first + offset
                held.add(owner, places, lengths)
                if _sender(known[part], owner) == rank:
                    given.add(owner, places, lengths)
        offset += length
    edges = [piece.offset for piece in pieces]
    return tuple(pieces), given.moves(edges), held.moves(edges)


def _as_owner(
    fragment: FragmentLayout,
    holders: Sequence[dict[TensorPart, list[int]]],
    run: FrameRun,
    ranks: int,
    rank: int,
) -> tuple[Moves, Moves]:
    owned, spread = _Sides(ranks), _Sides(ranks)
    if run.frames:
        for piece, known in zip(fragment.pieces, holders, strict=True):
            for part, ranks_with in known.items():
                whole, _, lengths = part.runs(*_overlap(piece, run))
                places = whole - piece.start + piece.offset - run.offset
                owned.add(_sender(ranks_with, rank), places, lengths)
                for holder in ranks_with:
                    spread.add(holder, places, lengths)
    return owned.moves(), spread.moves()


def _overlap(piece: Piece, run: FrameRun) -> tuple[int, int]:
    """Returns the overlap of a piece and a run: start and stop in the flat tensor. It is empty if start >= stop."""
    moved = piece.start - piece.offset
    start, stop = run.offset + moved, run.offset + run.length + moved
    return max(start, piece.start), min(stop, piece.start + piece.length)
