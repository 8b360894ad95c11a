"""Access to a rank's parameters as float32 in host memory: to their own memory if possible, else to a copy.

For types narrower than float32, this module keeps the rounding error of each fragment's last write, and adds it when
the values are read. The error is therefore neither lost nor sent as work.

Each torch call releases the GIL, and so does freeing a tensor. Each operation therefore makes one call for all tensors
of a fragment, on cached views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from atoll_wire.codec.block_kernels import F32
from torch import nn

from atoll.fragments.segments import I64
from atoll.ranks.division import LocalPiece
from atoll.ranks.placements import local_tensor


@dataclass(frozen=True, slots=True)
class FragmentMemory:
    """Views of the parameters in a fragment.

    at: addresses and strides of the parameters; the views are valid while these stay the same.
    pieces: flat views of the parameters, or of their contiguous copies.
    turned: each non-contiguous parameter, with its contiguous copy.
    staged: flat views of the pieces in each row of staging memory; empty if the parameters need no staging.
    addresses: int64 (pieces,), address of each piece's first float32 value.
    """

    at: list[tuple[int, ...]]
    pieces: list[torch.Tensor]
    turned: list[tuple[torch.Tensor, torch.Tensor]]
    staged: list[list[torch.Tensor]]
    addresses: I64


class HostMemory:
    """Reads and writes the parameters of each fragment.

    values: trainable parameters in the order of the layout's tensors. fragments: this rank's pieces of each fragment.
    """

    def __init__(self, values: Sequence[nn.Parameter], fragments: Sequence[Sequence[LocalPiece]]) -> None:
        self._values = values
        self._fragments = fragments
        self._lengths = [sum(piece.length for piece in pieces) for pieces in fragments]
        self._kept: dict[int, FragmentMemory] = {}
        self._staging = np.empty((2, 0), np.float32)
        self._lost: dict[int, F32] = {}  # by fragment: rounding error of the last write

    def read(self, number: int) -> I64:
        """Returns the address of each piece's float32 values, int64 (pieces,). Call `write` after changing the values.

        The next `read` of another fragment may overwrite them.
        """
        memory = self._memory(number)
        if memory.staged:
            self._stage(memory, 0)
            if number in self._lost:
                row = self._staging[0, : self._lengths[number]]
                np.add(row, self._lost[number], out=row)
        return memory.addresses

    def write(self, number: int) -> None:
        """Writes the values that `read` returned, and that the caller changed, to the parameters."""
        memory = self._memory(number)
        if not memory.staged:
            return
        with torch.no_grad():
            torch._foreach_copy_(memory.pieces, memory.staged[0])
            for parameter, ordered in memory.turned:
                parameter.copy_(ordered)
        if any(piece.dtype != torch.float32 for piece in memory.pieces):
            self._stage(memory, 1)
            wanted, stored = self._staging[:, : self._lengths[number]]
            self._lost[number] = wanted - stored

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""
        self._kept.clear()

    def _stage(self, memory: FragmentMemory, row: int) -> None:
        with torch.no_grad():
            torch._foreach_copy_(memory.staged[row], memory.pieces)

    def _memory(self, number: int) -> FragmentMemory:
        """Returns the fragment's FragmentMemory. Caches it until the parameters move, unless it contains copies."""
        tensors = {piece.tensor: local_tensor(self._values[piece.tensor]) for piece in self._fragments[number]}
        at = [(value.data_ptr(), *value.stride()) for value in tensors.values()]
        memory = self._kept.get(number)
        if memory is None or memory.at != at:
            memory = self._look(number, tensors, at)
            if not memory.turned:
                self._kept[number] = memory
        return memory

    def _look(self, number: int, tensors: dict[int, torch.Tensor], at: list[tuple[int, ...]]) -> FragmentMemory:
        places = self._fragments[number]
        ordered = {index: tensor.contiguous() for index, tensor in tensors.items()}
        turned = [(tensors[index], copy) for index, copy in ordered.items() if copy is not tensors[index]]
        pieces = [ordered[p.tensor].view(-1)[p.start : p.start + p.length] for p in places]
        plain = all(type(p) is torch.Tensor and p.is_cpu and p.dtype == torch.float32 for p in pieces)
        addresses = [piece.data_ptr() for piece in pieces]
        if plain and not turned and all(addresses):
            return FragmentMemory(at, pieces, [], [], np.array(addresses, np.int64))
        if not self._staging.size:
            self._staging = np.empty((2, max(self._lengths)), np.float32)
        rows = [torch.from_numpy(row) for row in self._staging]
        staged = [[row[p.offset : p.offset + p.length] for p in places] for row in rows]
        first = self._staging.ctypes.data
        return FragmentMemory(at, pieces, turned, staged, np.array([first + 4 * p.offset for p in places], np.int64))
