"""PURE: the part of a tensor that a rank holds, and the positions of its elements in the whole tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]
Range: TypeAlias = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangular block of a part. offsets: its first index in the whole tensor. at: its first index in the part."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A rank's part of a tensor: the elements whose indices are in `ranges`.

    shape: shape of the whole tensor. ranges: index ranges for each dimension, in ascending order.
    The part is stored as a smaller tensor. Its elements have the same order as in the whole tensor.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorPart:
        """Returns a part that contains the whole tensor."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part as a tensor."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def size(self) -> int:
        """The number of elements in the part."""
        return math.prod(self.local_shape)

    def runs(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        """Returns the part's runs of consecutive elements within a range of the whole tensor.

        start, stop: the half-open range in the flattened whole tensor. Returns three arrays, int64 (runs,), with each
        run's position in the flattened whole tensor, its position in the flattened part, and its length.
        """
        whole, part, lengths = self._all_runs()
        low, high = np.maximum(whole, start), np.minimum(whole + lengths, stop)
        kept = low < high
        moved = low - whole
        return low[kept], (part + moved)[kept], (high - low)[kept]

    def blocks(self) -> list[Block]:
        """Returns the rectangular blocks of the part. An empty part of a tensor that is not empty has no blocks."""
        if self.size == 0 < math.prod(self.shape):
            return []
        located = []
        for ranges in self.ranges:
            lengths = [stop - start for start, stop in ranges]
            ats = itertools.accumulate(lengths[:-1], initial=0)
            located.append([(start, n, at) for (start, _), n, at in zip(ranges, lengths, ats, strict=True)])
        rows = [tuple(zip(*each, strict=True)) or ((), (), ()) for each in itertools.product(*located)]
        return [Block(*row) for row in rows]

    def _all_runs(self) -> tuple[I64, I64, I64]:
        dimensions = enumerate(zip(self.shape, self.ranges, strict=True))
        cut = [number for number, (size, ranges) in dimensions if ranges != ((0, size),)]
        split = cut[-1] if cut else 0  # the later dimensions are whole, so each range of this one is a run
        inner = math.prod(self.shape[split + 1 :])
        ranges = self.ranges[split] if self.shape else ((0, 1),)
        firsts = np.array([start * inner for start, _ in ranges], np.int64)
        lengths = np.array([(stop - start) * inner for start, stop in ranges], np.int64)
        outer = np.zeros(1, np.int64)
        for dimension in range(split):
            indices = np.concatenate([firsts[:0], *(np.arange(*each) for each in self.ranges[dimension])])
            outer = (outer[:, None] * self.shape[dimension] + indices).reshape(-1)
        stride = inner * (self.shape[split] if self.shape else 1)
        whole = (outer[:, None] * stride + firsts).reshape(-1)
        lengths = np.tile(lengths, len(outer))
        return whole, np.cumsum(lengths) - lengths, lengths


def chunk(ranges: Sequence[Range], number: int, chunks: int) -> tuple[Range, ...]:
    """Returns chunk `number` of the indices in `ranges`. As with torch.chunk, the last chunks may be shorter or empty.

    chunks: number of chunks into which the indices are divided.
    """
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // chunks)
    low, high = min(number * size, total), min((number + 1) * size, total)
    found, before = [], 0
    for start, stop in ranges:
        first, last = max(start, start + low - before), min(stop, start + high - before)
        if first < last:
            found.append((first, last))
        before += stop - start
    return tuple(found)
