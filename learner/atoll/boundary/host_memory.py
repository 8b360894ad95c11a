"""Access to a rank's parameters as float32 in host memory: to the parameters' own memory if possible, else to a copy.

For types narrower than float32, this module keeps the rounding error of each fragment's last write and adds it when the
values are read. The error is therefore neither lost nor sent as work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from atoll_wire.codec.block_kernels import F32
from torch import nn

from atoll.fragments.segments import I64
from atoll.model.parameter_views import FragmentViews, ParameterViews
from atoll.ranks.division import LocalPiece


@dataclass(frozen=True, slots=True)
class FragmentMemory:
    """The memory of a fragment's values.

    staged: flat views of the pieces in each row of staging memory; empty if the parameters need no staging.
    addresses: int64 (pieces,), address of each piece's first float32 value.
    """

    views: FragmentViews
    staged: list[list[torch.Tensor]]
    addresses: I64


class HostMemory:
    """Reads and writes the parameters of each fragment.

    values: trainable parameters in the order of the layout's tensors. fragments: this rank's pieces of each fragment.
    """

    def __init__(self, values: Sequence[nn.Parameter], fragments: Sequence[Sequence[LocalPiece]]) -> None:
        self._views = ParameterViews(values, fragments)
        self._fragments = fragments
        self._lengths = [sum(piece.length for piece in pieces) for pieces in fragments]
        self._kept: dict[int, FragmentMemory] = {}
        self._staging = np.empty((2, 0), np.float32)
        self._lost: dict[int, F32] = {}  # rounding error of the last write, by fragment

    def read(self, number: int) -> I64:
        """Returns the address of each piece's float32 values, int64 (pieces,). Call `write` after changing the values.

        The next `read` of another fragment may overwrite them.
        """
        memory = self._memory(number)
        if memory.staged:
            memory.views.load(memory.staged[0])
            if number in self._lost:
                row = self._staging[0, : self._lengths[number]]
                np.add(row, self._lost[number], out=row)
        return memory.addresses

    def write(self, number: int) -> None:
        """Writes the values at the addresses from `read`, which the caller has changed, to the parameters."""
        memory = self._memory(number)
        if not memory.staged:
            return
        memory.views.store(memory.staged[0])
        if memory.views.narrow:
            memory.views.load(memory.staged[1])
            wanted, stored = self._staging[:, : self._lengths[number]]
            self._lost[number] = wanted - stored

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""
        self._views.forget()
        self._kept.clear()

    def _memory(self, number: int) -> FragmentMemory:
        """Returns the fragment's FragmentMemory. Keeps it until the parameters move, unless it contains copies."""
        views, memory = self._views.of(number), self._kept.get(number)
        if memory is None or memory.views is not views:
            memory = self._look(number, views)
            if not views.turned:
                self._kept[number] = memory
        return memory

    def _look(self, number: int, views: FragmentViews) -> FragmentMemory:
        plain = all(type(p) is torch.Tensor and p.is_cpu and p.dtype == torch.float32 for p in views.pieces)
        addresses = [piece.data_ptr() for piece in views.pieces]
        if plain and not views.turned and all(addresses):
            return FragmentMemory(views, [], np.array(addresses, np.int64))
        if not self._staging.size:
            self._staging = np.empty((2, max(self._lengths)), np.float32)
        rows, places = [torch.from_numpy(row) for row in self._staging], self._fragments[number]
        staged = [[row[p.offset : p.offset + p.length] for p in places] for row in rows]
        first = self._staging.ctypes.data
        return FragmentMemory(views, staged, np.array([first + 4 * p.offset for p in places], np.int64))
