"""The assignment of tensors to fragments, and of fragments' values to frames.

A layout depends only on the list of trainable tensors and the number of fragments. A core and its learners therefore
compute the same layout, and compare only fingerprints.

Packing: tensors that are merged by direction go into the emptiest fragment, largest first. The largest fragment is then
at most 4/3 of the optimum (Graham 1969). These tensors are cut only above twice the mean fragment size, and the merge
treats each piece as its own tensor. Embedding-like tensors are merged element by element, so they may be cut by rows.
They fill the smaller fragments up to a common size, so the peak rate on the wire is close to the mean.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from atoll_wire.errors import UserError
from atoll_wire.layout.frame_spans import BLOCK, FrameSpan, Segment

FORMAT = 2  # version of the layout's rules; part of the fingerprint
FRAME_PARAMETERS = 1 << 19  # limit per frame
DEFAULT_FRAGMENTS, MAX_FRAGMENTS = 24, 4096
DTYPES = ("float32", "bfloat16", "float16")


class LayoutError(UserError):
    """The tensors cannot be laid out as requested. The message is one line with the fix."""


class MergeKind(StrEnum):
    """How a merge combines the contributions to a tensor: element by element, or by direction and length."""

    AVERAGE = "average"
    DIRECTION = "direction"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One trainable tensor. tied_names: other names of the same storage, sorted."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: MergeKind
    tied_names: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of parameters in the tensor."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """The number of parameters in one row. Embedding-like tensors are cut between rows."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole tensor, or consecutive elements of the flat tensor.

    tensor: the tensor's number. offset: position in the fragment's vector.
    """

    tensor: int
    start: int
    length: int
    offset: int
    kind: MergeKind
    name: str


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """Parameters that are synchronised together: pieces that are concatenated into a vector of `length` values."""

    index: int
    length: int
    pieces: tuple[Piece, ...]
    frames: tuple[FrameSpan, ...]

    @property
    def whole(self) -> FrameRun:
        """All frames of the fragment as one run."""
        return FrameRun(self, 0, 0, self.length, self.frames)

    def run(self, first: int, count: int) -> FrameRun:
        """Returns `count` frames from number `first` on. Raises IndexError for frames that do not exist."""
        if not (first >= 0 and 0 < count <= len(self.frames) - first):
            last = first + count - 1
            raise IndexError(f"frames {first} to {last} are out of range: the fragment has {len(self.frames)} frames")
        frames = self.frames[first : first + count]
        start = frames[0].offset
        moved = tuple(frame.moved(-start) for frame in frames)
        return FrameRun(self, first, start, sum(frame.length for frame in frames), moved)


@dataclass(frozen=True, slots=True)
class FrameRun:
    """Consecutive frames of one fragment, with their values as one vector. One rank of a learner handles them.

    first: number of the first frame. offset: start of the run's vector in the fragment's vector. frames: the frames,
    with offsets in the run's vector and numbers in the fragment.
    """

    fragment: FragmentLayout
    first: int
    offset: int
    length: int
    frames: tuple[FrameSpan, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """All fragments of a model. fingerprint: SHA-256 of everything that both sides must agree on."""

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[FragmentLayout, ...]
    fingerprint: bytes

    @property
    def runs(self) -> list[FrameRun]:
        """All frames of each fragment, as one run per fragment."""
        return [fragment.whole for fragment in self.fragments]

    @property
    def parameters(self) -> int:
        """The number of trainable parameters of the model."""
        return sum(fragment.length for fragment in self.fragments)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Consecutive elements of a flat tensor, before they have an offset."""

    tensor: int
    start: int
    length: int


def plan(tensors: Sequence[TensorSpec], fragments: int) -> Layout:
    """Returns a layout of these tensors. fragments: number of fragments; 0: 24, or fewer if a fragment would be empty.

    Raises LayoutError for too many fragments, a model without parameters, duplicate names, and dtypes not in DTYPES.
    """
    _check(tensors)
    if fragments > MAX_FRAGMENTS:
        raise LayoutError(f"{fragments} fragments are too many: use at most {MAX_FRAGMENTS}")
    if fragments:
        bins = _pack(tensors, fragments)
        if not all(bins):
            while not all(bins):  # use fewer fragments until none is empty
                bins = _pack(tensors, len(bins) - 1 if len(bins) <= 64 else 3 * len(bins) // 4)
            raise LayoutError(
                f"{fragments} fragments are too many for these tensors: start the core with --fragments {len(bins)}, "
                "or omit the option"
            )
    else:
        packed = (_pack(tensors, count) for count in range(DEFAULT_FRAGMENTS, 0, -1))
        bins = next(bins for bins in packed if all(bins))
    laid = tuple(_lay(index, tensors, cuts) for index, cuts in enumerate(bins))
    return Layout(tuple(tensors), laid, _fingerprint(tensors, laid))


def first_difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str | None:
    """Returns one line about the first difference between two models' tensors, or None if they are equal.

    ours: the run's tensors. theirs: the learner's tensors.
    """
    known, given = {t.name: t for t in ours}, {t.name: t for t in theirs}
    outer, ours_outer = _prefix(given, known), _prefix(known, given)
    if outer or ours_outer:
        whose, other = ("its", "those of the run") if outer else ("the run's", "its own")
        return f'the names of {whose} tensors begin with "{outer or ours_outer}.", but {other} do not'
    missing, extra = (
        [name for name in these if name not in those] for these, those in ((known, given), (given, known))
    )
    if missing or extra:
        which = f'missing "{missing[0]}"' if missing else f'"{extra[0]}" is not in the run'
        return f"it has {len(given)} tensors, but the run has {len(known)}: {which}"
    for name, tensor in known.items():
        if given[name] != tensor:
            return f'"{name}" is {_describe(given[name])}, but in the run it is {_describe(tensor)}'
    if list(known) != list(given):
        name = next(mine for mine, other in zip(given, known, strict=True) if mine != other)
        return f'its tensors are in a different order, first at "{name}": define the model in the same order as the run'
    return None


def remedy(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str:
    """Returns the fix for the user of a different model. ours: the run's tensors. theirs: the learner's tensors."""
    known, given = {t.name: t for t in ours}, {t.name: t for t in theirs}
    if outer := _prefix(given, known):
        return f'share only the submodule "{outer}"; with Lightning, pass AtollCallback(module="{outer}")'
    if outer := _prefix(known, given):
        return f'pass a module whose attribute "{outer}" is this model'
    if [replace(t, dtype="") for t in theirs] == [replace(t, dtype="") for t in ours]:
        dtype = next(run.dtype for run, own in zip(ours, theirs, strict=True) if run.dtype != own.dtype)
        return (
            f"call model.to(torch.{dtype}) before you create the optimizer; to compute in another precision, use "
            "torch.autocast"
        )
    return "build the model of the run, or start a core with another --dir"


def _prefix(longer: Collection[str], shorter: Collection[str]) -> str:
    """Returns the module name that precedes each `shorter` name in `longer`, or "" if there is no such name."""
    if not longer or len(longer) != len(shorter):
        return ""
    head, first = next(iter(longer)), next(iter(shorter))
    outer = head.removesuffix(f".{first}")
    is_outer = outer != head and set(longer) == {f"{outer}.{name}" for name in shorter}
    return outer if is_outer else ""


def _describe(tensor: TensorSpec) -> str:
    tied = f" tied to {', '.join(tensor.tied_names)}" if tensor.tied_names else ""
    return f"{tensor.dtype} {list(tensor.shape)} merged by {tensor.kind.value}{tied}"


def _check(tensors: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise LayoutError(
                f'"{tensor.name}" is {tensor.dtype}, which cannot be trained: use one of {", ".join(DTYPES)}'
            )
        for name in (tensor.name, *tensor.tied_names):
            if name in seen:
                raise LayoutError(f'two tensors are named "{name}": give each tensor a unique name')
            seen.add(name)
    if not any(tensor.size for tensor in tensors):
        raise LayoutError(
            "the model has no trainable parameters: set requires_grad, and pass the parameters to the optimizer"
        )


# ------------------------------------------------------------------------------------------------- packing


def _pack(tensors: Sequence[TensorSpec], count: int) -> list[list[_Cut]]:
    mean = sum(tensor.size for tensor in tensors) / count
    bins: list[list[_Cut]] = [[] for _ in range(count)]
    loads = [0] * count
    by_direction = [
        cut
        for index, t in enumerate(tensors)
        if t.kind is MergeKind.DIRECTION and t.size
        for cut in _pieces(index, t, mean)
    ]
    emptiest = [(0, place) for place in range(count)]  # a heap
    for cut in sorted(by_direction, key=lambda cut: (-cut.length, cut.tensor, cut.start)):
        load, place = emptiest[0]
        bins[place].append(cut)
        loads[place] = load + cut.length
        heapq.heapreplace(emptiest, (loads[place], place))
    _pour([(index, t) for index, t in enumerate(tensors) if t.kind is MergeKind.AVERAGE and t.size], bins, loads)
    return bins


def _pieces(index: int, tensor: TensorSpec, mean: float) -> Iterable[_Cut]:
    """Returns the tensor as one piece, or as nearly equal pieces if it is larger than twice the mean fragment size."""
    if tensor.size <= 2 * mean:
        return [_Cut(index, 0, tensor.size)]
    unit = tensor.row if len(tensor.shape) > 1 and tensor.row <= mean else 1
    units = tensor.size // unit
    parts = min(units, math.ceil(tensor.size / mean))
    edges = [units * part // parts * unit for part in range(parts + 1)]
    return [_Cut(index, start, stop - start) for start, stop in itertools.pairwise(edges)]


def _pour(tensors: Sequence[tuple[int, TensorSpec]], bins: list[list[_Cut]], loads: list[int]) -> None:
    """Fills fragments up to a common size with rows of embedding-like tensors, emptiest fragment first."""
    level = _level(loads, sum(tensor.size for _, tensor in tensors))
    order = sorted(range(len(loads)), key=lambda place: (loads[place], place))
    at = 0
    for index, tensor in tensors:
        start = 0
        while start < tensor.size:
            place = order[at]
            room = level - loads[place]
            rows = round(room / tensor.row)
            last = at == len(order) - 1
            length = tensor.size - start if last else min(tensor.size - start, rows * tensor.row)
            if length > 0:
                bins[place].append(_Cut(index, start, length))
                loads[place] += length
                start += length
            if not last and start < tensor.size:
                at += 1


def _level(loads: Sequence[int], volume: int) -> float:
    """Returns the load to which `volume` parameters fill the emptiest fragments."""
    ordered = sorted(loads)
    below = 0
    for count, load in enumerate(ordered, start=1):
        below += load
        level = (volume + below) / count
        if count == len(ordered) or level <= ordered[count]:
            return level
    raise AssertionError("there is at least one fragment")


# ------------------------------------------------------------------------------------------------- laying out


def _lay(index: int, tensors: Sequence[TensorSpec], cuts: Sequence[_Cut]) -> FragmentLayout:
    pieces: list[Piece] = []
    offset = 0
    for cut in sorted(cuts, key=lambda cut: (cut.tensor, cut.start)):
        tensor = tensors[cut.tensor]
        whole = cut.length == tensor.size
        name = tensor.name if whole else f"{tensor.name}[{cut.start}:{cut.start + cut.length}]"
        pieces.append(Piece(cut.tensor, cut.start, cut.length, offset, tensor.kind, name))
        offset += cut.length
    return FragmentLayout(index, offset, tuple(pieces), _frames(pieces))


def _frames(pieces: Sequence[Piece]) -> tuple[FrameSpan, ...]:
    """Packs small whole pieces together and cuts large pieces. A frame never contains parts of two cut pieces."""
    groups: list[list[Segment]] = []
    room = 0
    for number, piece in enumerate(pieces):
        if piece.length <= FRAME_PARAMETERS:
            if piece.length > room:
                groups.append([])
                room = FRAME_PARAMETERS
            groups[-1].append(Segment(number, piece.offset, piece.length))
            room -= piece.length
        else:
            for start in range(0, piece.length, FRAME_PARAMETERS):
                length = min(FRAME_PARAMETERS, piece.length - start)
                groups.append([Segment(number, piece.offset + start, length)])
            room = 0
    return tuple(
        FrameSpan(index, group[0].offset, sum(segment.length for segment in group), tuple(group))
        for index, group in enumerate(groups)
    )


def _fingerprint(tensors: Sequence[TensorSpec], fragments: Sequence[FragmentLayout]) -> bytes:
    text = {
        "format": FORMAT,
        "block": BLOCK,
        "tensors": [[t.name, t.shape, t.dtype, t.kind.value, t.tied_names] for t in tensors],
        "fragments": [[[p.tensor, p.start, p.length] for p in fragment.pieces] for fragment in fragments],
        "frames": [[[f.offset, f.length] for f in fragment.frames] for fragment in fragments],
    }
    return hashlib.sha256(json.dumps(text, separators=(",", ":")).encode()).digest()
