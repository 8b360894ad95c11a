"""PURE: the coder of a learner with a single process, whose parameters are in host memory.

It encodes from the parameters themselves, and an adoption decodes into them. With several ranks, `segments` is the
coder: its values are vectors, because the ranks send them to each other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from atoll_wire.codec.block_kernels import F32

from atoll.fragments import segments
from atoll.fragments.segments import I64, Coded, FragmentShape

ahead = segments.ahead
max_changes_ahead = sys.maxsize  # see Coder; they only refer to coded values


@dataclass(frozen=True, slots=True)
class CodedSum:
    """The sum of coded values, of which only the coded form is in memory."""

    coded: tuple[Coded, ...]
    shape: FragmentShape

    def add_to(self, starts: I64) -> None:
        """Adds the sum to values in memory. starts: int64 (segments,), address of each segment's first float32."""
        segments.add_coded(self.coded, self.shape, starts)

    def vector(self) -> F32:
        """Returns the sum, float32 (shape.length,)."""
        out = np.zeros(self.shape.length, np.float32)
        self.add_to(out.ctypes.data + 4 * self.shape.rows[:, 0])
        return out


@dataclass(frozen=True, slots=True)
class Located:
    """Values in the memory of the parameters. starts: int64 (segments,), address of each segment's first float32."""

    starts: I64


def code(anchor: F32, values: F32 | Located, shape: FragmentShape) -> Coded:
    """Encodes `anchor - values`. Raises CodecError if a value is not finite. See `segments.code`."""
    if isinstance(values, Located):
        return segments.code_in_place(anchor, values.starts, shape)
    return segments.code(anchor, values, shape)


def change(old: F32, new: F32, update: Coded | None, q: Coded | None, shape: FragmentShape) -> F32 | CodedSum:
    """Returns the values that an adoption adds to the parameters. The arguments are those of `segments.change`."""
    if update is None:
        return segments.change(old, new, None, q, shape)
    return CodedSum(tuple(coded for coded in (update, q) if coded is not None), shape)
