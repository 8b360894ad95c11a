"""Each fragment's parameters as float32 in host memory: the original memory if it is float32 on the host, else a copy.

Each torch call and each freed tensor releases the GIL. Each operation therefore makes one call for all tensors of a
fragment, on views that this module keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from atoll_wire.codec.block_kernels import F32
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FrameRun
from torch import nn

from atoll.fragments.segments import FragmentShape, SegmentAddresses


@dataclass(frozen=True, slots=True)
class FragmentMemory:
    """Views of the parameters in a run of frames.

    at: addresses and strides of the parameters; the views are valid while these stay the same.
    pieces: flat views of the parameters. turned: each non-contiguous parameter and its contiguous copy; views show
    the copy. staged: flat views of each row of staging memory. direct: the parameters' own memory, if it is contiguous
    float32 on the host.
    """

    at: list[tuple[int, ...]]
    pieces: list[torch.Tensor]
    turned: list[tuple[torch.Tensor, torch.Tensor]]
    staged: list[list[torch.Tensor]]
    direct: SegmentAddresses | None


class HostMemory:
    """Keeps one FragmentMemory per run of frames. values: trainable parameters in the order of the layout's tensors."""

    def __init__(self, values: Sequence[nn.Parameter], runs: Sequence[FrameRun], codec: Codec) -> None:
        self._values = values
        self._runs = runs
        self.shapes = [FragmentShape.of(run, codec) for run in runs]
        self._kept: dict[int, FragmentMemory] = {}
        self._staging = np.empty((2, 0), np.float32)

    def read(self, number: int) -> SegmentAddresses:
        """Returns memory where a run's parameters can be read and changed as float32. Call `write` after a change."""
        window = self._window(number)
        if window.direct is not None:
            return window.direct
        return SegmentAddresses.in_vector(self._stage(window, number, 0), self.shapes[number])

    def write(self, number: int) -> tuple[F32, F32] | None:
        """Stores changed values. Returns the (wanted, stored) values if a parameter is not float32, else None.

        Both are float32 (fragment.length,) in staging memory. The next `read` or `write` overwrites them.
        """
        window = self._window(number)
        if window.direct is not None:
            return None
        with torch.no_grad():
            torch._foreach_copy_(window.pieces, window.staged[0])
            for parameter, ordered in window.turned:
                parameter.copy_(ordered)
        if all(piece.dtype == torch.float32 for piece in window.pieces):
            return None
        return self._staging[0, self._place(number)], self._stage(window, number, 1)

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""
        self._kept.clear()

    def _stage(self, window: FragmentMemory, number: int, row: int) -> F32:
        with torch.no_grad():
            torch._foreach_copy_(window.staged[row], window.pieces)
        return self._staging[row, self._place(number)]

    def _place(self, number: int) -> slice:
        """Returns the slice of a run in its fragment's vector."""
        run = self._runs[number]
        return slice(run.offset, run.offset + run.length)

    def _window(self, number: int) -> FragmentMemory:
        """Returns the run's FragmentMemory. It is cached until the parameters move, unless it has copies."""
        values = [self._values[piece.tensor] for piece in self._runs[number].fragment.pieces]
        at = [(value.data_ptr(), *value.stride()) for value in values]
        window = self._kept.get(number)
        if window is None or window.at != at:
            window = self._look(number, at)
            if not window.turned:
                self._kept[number] = window
        return window

    def _look(self, number: int, at: list[tuple[int, ...]]) -> FragmentMemory:
        fragment = self._runs[number].fragment
        tensors = {piece.tensor: self._values[piece.tensor].detach() for piece in fragment.pieces}
        ordered = {index: tensor.contiguous() for index, tensor in tensors.items()}
        turned = [(tensors[index], copy) for index, copy in ordered.items() if copy is not tensors[index]]
        pieces = [ordered[p.tensor].view(-1)[p.start : p.start + p.length] for p in fragment.pieces]
        addresses = [piece.data_ptr() for piece in pieces]
        plain = all(type(p) is torch.Tensor and p.is_cpu and p.dtype == torch.float32 for p in pieces)
        if plain and not turned and all(addresses):
            return FragmentMemory(
                at, pieces, [], [], SegmentAddresses.in_pieces(addresses, self.shapes[number], pieces)
            )
        if not self._staging.size:
            self._staging = np.empty((2, max(run.fragment.length for run in self._runs)), np.float32)
        rows = [torch.from_numpy(row) for row in self._staging]
        staged = [[row[p.offset : p.offset + p.length] for p in fragment.pieces] for row in rows]
        return FragmentMemory(at, pieces, turned, staged, None)
