"""Reads values at a few places in the parameters. A read takes microseconds and does not wait for a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from atoll_wire.codec.block_kernels import F32
from numpy.typing import NDArray
from torch import nn

from atoll.fragments.segments import I64, gather
from atoll.ranks.division import Division, LocalPiece
from atoll.ranks.placements import addresses, local_tensor

PLACES = 8  # usual number of places; with more fragments than this, each sampled fragment has one place
VALUES = 256  # number of values in all places together
MIN_VALUES = 8  # lower bound on the values per place
MAX_PLACES = VALUES // MIN_VALUES

Row = F32 | torch.Tensor  # concatenated values of all places; a device may not have computed them yet


class ParameterSamples:
    """Samples of a rank's parameters, at places in all fragments or in at most MAX_PLACES of them.

    values: trainable parameters in the order of the layout. divisions: this rank's division of each fragment.
    edges: start of each place in a row. fragments: index of each place's fragment. rounding: machine epsilon of each
    place's dtype. parameters: the parameters that contain places.
    """

    def __init__(self, values: Sequence[nn.Parameter], divisions: Sequence[Division]) -> None:
        self._values = values
        self._views: list[torch.Tensor] = []
        self._direct: tuple[I64, I64] | None = None
        self._chosen = [
            (division.fragment.index, piece, start)
            for division in divisions[:: -(-len(divisions) // MAX_PLACES)]
            for piece, start in _chosen(division, -(-PLACES // len(divisions)))
            if values[piece.tensor].device == values[0].device
        ]
        self._length = VALUES // max(PLACES, len(self._chosen))
        self.fragments = np.array([number for number, _, _ in self._chosen], np.int64)
        self.parameters = list({id(p): p for p in (values[piece.tensor] for _, piece, _ in self._chosen)}.values())
        self._look()

    def settle(self) -> bool:
        """Updates the views if the parameters' memory moved. Returns whether `edges` changed."""
        if self._views and self._at == addresses(self.parameters):
            return False
        before = self.edges
        self._look()
        return not np.array_equal(before, self.edges)

    def forget(self) -> None:
        """Drops all references to the parameters' memory."""
        self._views.clear()
        self._direct = None

    def read(self) -> Row:
        """Returns the current values of all places, in new memory."""
        if not self._views:
            self._look()
        if self._direct is not None:
            row = np.empty(self._size, np.float32)
            gather(*self._direct, row)
            return row
        return torch.cat(self._views)

    def recorded(self) -> bool:
        """Returns whether a CUDA graph is being captured. A read would become part of the graph."""
        return self.parameters[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _look(self) -> None:
        self._at = addresses(self.parameters)
        self._views = [
            view(local_tensor(self._values[piece.tensor]), start, self._length) for _, piece, start in self._chosen
        ]
        self._direct = None
        lengths = [len(each) for each in self._views]
        self._size = sum(lengths)
        self.edges = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
        self.rounding = np.array([torch.finfo(each.dtype).eps for each in self._views], np.float32)
        if all(each.is_cpu and each.dtype == torch.float32 and each.is_contiguous() for each in self._views):
            rows = np.zeros((len(lengths), 5), np.int64)
            rows[:, 0], rows[:, 1] = self.edges, lengths
            self._direct = np.array([each.data_ptr() for each in self._views], np.int64), rows


class Block:
    """Rows that are being copied to the host."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._event: torch.cuda.Event | None = None
        self._rows: NDArray[np.float32] | torch.Tensor
        first = rows[0]
        if isinstance(first, torch.Tensor) and first.is_cuda and all(r.device == first.device for r in rows):
            with torch.no_grad():
                stacked = torch.stack([row for row in rows if isinstance(row, torch.Tensor)]).float()
                self._rows = torch.empty(stacked.shape, dtype=torch.float32, pin_memory=True)
                self._rows.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._rows = np.stack([row if isinstance(row, np.ndarray) else row.float().cpu().numpy() for row in rows])

    @property
    def there(self) -> bool:
        """Whether `rows` would return without waiting."""
        return self._event is None or self._event.query()

    def rows(self) -> F32:
        """Returns the rows, float32 (rows, values). Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._rows if isinstance(self._rows, np.ndarray) else self._rows.numpy()


def _chosen(division: Division, count: int) -> list[tuple[LocalPiece, int]]:
    """Returns `count` evenly spaced places in this rank's largest pieces of a fragment: (piece, first element)."""
    largest = sorted(division.pieces, key=lambda piece: -piece.length)[:count]
    found = list[tuple[LocalPiece, int]]()
    for turn in range(count if largest else 0):
        piece = largest[turn % len(largest)]
        here = -(-(count - turn % len(largest)) // len(largest))  # places in this piece
        found.append((piece, piece.start + piece.length * (2 * (turn // len(largest)) + 1) // (2 * here)))
    return found


def view(tensor: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """Returns a view of up to `length` values from flat element `start`, or from an earlier one if too few follow.

    If the tensor is not contiguous, all values are from one row of its last dimension.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[min(start, max(0, tensor.numel() - length)) :][:length]
    while tensor.dim() > 1:
        size = tensor[0].numel()
        tensor, start = tensor[start // size], start % size
    return tensor[min(start, max(0, len(tensor) - length)) :][:length]
