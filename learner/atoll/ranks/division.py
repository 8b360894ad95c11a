"""PURE: how the ranks of a learner divide a fragment.

A fragment's values have two divisions. As parameters, ranks hold parts of tensors, by the model's placements. As
frames, each rank owns one run of consecutive frames: its anchor, and all of its coding and transfers. This module lists
what moves between the two: each rank's parts to the owners before a take, and the owners' changes back in an adoption.

Between two ranks, values go in the fragment's order, in one message. Ranks with the same part of a tensor have copies
of it: one of them sends, and all receive.
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
    """Consecutive elements of one tensor's part on a rank. start: in the flat part. offset: among the rank's values."""

    tensor: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Values that one rank sends, or receives, in one exchange of all ranks, in the order of the message buffer.

    places, lengths: int64 (runs,): positions in the rank's own vector, and lengths. counts: values per other rank.
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
        """Returns whether the message is a whole vector of this length, in order."""
        return len(self.places) == 1 and self.places[0] == 0 and self.lengths[0] == length


@dataclass(frozen=True, slots=True)
class Division:
    """One rank's view of a fragment. run: the frames that it owns, which are none if there are more ranks than frames.

    pieces: its parts of the fragment's tensors. Together they are its local vector. given, owned: a take sends `given`
    of the local vector, and receives `owned` of the run. spread, held: an adoption sends `spread` of the run, and
    receives `held` of the local vector.
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
    """Returns each rank's run of frames. Runs have nearly equal lengths, and the first owner differs by fragment.

    Without the last rule, ranks without frames would be the same in all fragments.
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
    """The assignment of frames to ranks. rank: this process's."""

    rank: int = 0
    size: int = 1

    def run(self, fragment: FragmentLayout) -> FrameRun:
        """Returns the run of frames that this rank owns, which may be empty."""
        return owned_runs(fragment, self.size)[self.rank]


def undivided(layout: Layout) -> list[Division]:
    """Returns the divisions of a learner of one process, which holds and owns everything."""
    whole = [[TensorPart.whole(tensor.shape) for tensor in layout.tensors]]
    return [divide(fragment, whole, 0) for fragment in layout.fragments]


def divide(fragment: FragmentLayout, parts: Sequence[Sequence[TensorPart]], rank: int) -> Division:
    """Returns a rank's division of a fragment. parts: by rank and tensor of the layout."""
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
    """Returns the rank that sends a part to an owner: the owner itself, or one of the holders in turn."""
    return owner if owner in holders else holders[owner % len(holders)]


class _Sides:
    """Collects runs by the rank at the other side."""

    def __init__(self, ranks: int) -> None:
        self._found: list[list[tuple[I64, I64]]] = [[] for _ in range(ranks)]

    def add(self, rank: int, places: I64, lengths: I64) -> None:
        self._found[rank].append((places, lengths))

    def moves(self, edges: Sequence[int] = ()) -> Moves:
        """Returns all runs. Runs that follow one another are joined, except at the edges."""
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
    """Returns the flat positions of a piece's tensor that are in a run. Empty if start >= stop."""
    moved = piece.start - piece.offset
    start, stop = run.offset + moved, run.offset + run.length + moved
    return max(start, piece.start), min(stop, piece.start + piece.length)
