"""PURE: the part of a tensor that a rank holds, and the places of its elements in the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

I64: TypeAlias = NDArray[np.int64]
Range: TypeAlias = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A rank's part of a tensor: the elements whose indices are in `ranges`.

    shape: the whole tensor's. ranges: per dimension, in ascending order. The part is a tensor of its own, so its flat
    order follows that of the whole tensor.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorPart:
        """Returns the part that is the whole tensor."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The part's own shape."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def size(self) -> int:
        """The number of elements in the part."""
        return math.prod(self.local_shape)

    def runs(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        """Returns the runs of consecutive elements between two flat positions of the whole tensor.

        Each array is int64 (runs,): first flat position in the whole tensor, position in the part, and length.
        """
        whole, part, lengths = self._all_runs()
        low, high = np.maximum(whole, start), np.minimum(whole + lengths, stop)
        kept = low < high
        moved = low - whole
        return low[kept], (part + moved)[kept], (high - low)[kept]

    def _all_runs(self) -> tuple[I64, I64, I64]:
        dimensions = enumerate(zip(self.shape, self.ranges, strict=True))
        cut = [number for number, (size, ranges) in dimensions if ranges != ((0, size),)]
        split = cut[-1] if cut else 0  # later dimensions are whole, so a range of this one is a run
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
    """Returns one of several chunks of indices. As with torch.chunk, the last ones may be short or empty."""
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
