"""Views of each fragment's parameters, which are kept until the parameters' memory moves.

Each torch call releases the GIL, and so does freeing a tensor. Callers therefore make one call for all tensors of a
fragment, on these views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from atoll.device.device_coder import copy_all
from atoll.ranks.division import LocalPiece
from atoll.ranks.placements import local_tensor


@dataclass(frozen=True, slots=True, eq=False)
class FragmentViews:
    """Views of the parameters in a fragment.

    at: addresses and strides of the parameters; the views are valid while these stay the same.
    pieces: flat views of the parameters, or of their contiguous copies.
    turned: each non-contiguous parameter and its contiguous copy.
    """

    at: list[tuple[int, ...]]
    pieces: list[torch.Tensor]
    turned: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def narrow(self) -> bool:
        """Whether a piece has a type other than float32, so that writing rounds."""
        return any(piece.dtype != torch.float32 for piece in self.pieces)

    def store(self, parts: Sequence[torch.Tensor]) -> None:
        """Writes values to the parameters. parts: float32, the values of each piece."""
        with torch.no_grad():
            copy_all(self.pieces, parts)
            for parameter, ordered in self.turned:
                parameter.copy_(ordered)

    def load(self, parts: Sequence[torch.Tensor]) -> None:
        """Copies the parameters' values to float32 tensors, one for each piece."""
        with torch.no_grad():
            copy_all(parts, self.pieces)


class ParameterViews:
    """The views of each fragment.

    values: trainable parameters in the order of the layout's tensors. fragments: this rank's pieces of each fragment.
    """

    def __init__(self, values: Sequence[nn.Parameter], fragments: Sequence[Sequence[LocalPiece]]) -> None:
        self._values = values
        self._fragments = fragments
        self._kept: dict[int, FragmentViews] = {}

    def of(self, number: int) -> FragmentViews:
        """Returns a fragment's views. They are new if the parameters have moved, or if the views contain copies."""
        tensors = {piece.tensor: local_tensor(self._values[piece.tensor]) for piece in self._fragments[number]}
        at = [(value.data_ptr(), *value.stride()) for value in tensors.values()]
        views = self._kept.get(number)
        if views is None or views.at != at:
            ordered = {index: tensor.contiguous() for index, tensor in tensors.items()}
            turned = [(tensors[index], copy) for index, copy in ordered.items() if copy is not tensors[index]]
            pieces = [ordered[p.tensor].view(-1)[p.start : p.start + p.length] for p in self._fragments[number]]
            views = FragmentViews(at, pieces, turned)
            if not turned:
                self._kept[number] = views
        return views

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""
        self._kept.clear()
