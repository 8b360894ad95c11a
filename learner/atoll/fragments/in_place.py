"""PURE: the coder of a learner with a single process, whose parameters are in host memory.

An adoption decodes into the parameters themselves. With several ranks, `segments` is the coder: its changes are
vectors, because the owner of the frames sends them to the other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from atoll_wire.codec.block_kernels import F32

from atoll.fragments import segments
from atoll.fragments.segments import I64, Coded, FragmentShape

ahead, code = segments.ahead, segments.code


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


def change(old: F32, new: F32, update: Coded | None, q: Coded | None, shape: FragmentShape) -> F32 | CodedSum:
    """Returns the values that an adoption adds to the parameters. The arguments are those of `segments.change`."""
    if update is None:
        return segments.change(old, new, None, q, shape)
    return CodedSum(tuple(coded for coded in (update, q) if coded is not None), shape)
