"""The values of a learner of one process, on the device of its parameters. The training thread only queues work.

For types narrower than float32, this module keeps the rounding error of each fragment's last write on the device, as
`host_memory` does in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from atoll_wire.codec.block_kernels import F32
from atoll_wire.layout.frame_spans import BLOCK
from torch import nn

from atoll.boundary.parameter_views import ParameterViews
from atoll.device.block_layout import BlockLayout
from atoll.device.device_coder import DeviceCoder, OnDevice, segment_values
from atoll.fragments.segments import FragmentShape
from atoll.ranks.division import Division, LocalPiece


class DeviceValues:
    """Values as blocks on a device. See `local_parameters.Values`.

    values: trainable parameters in the order of the layout's tensors, all on the coder's device. divisions: the
    division of each fragment, which has one rank. shapes: the shape of each fragment.
    """

    def __init__(
        self,
        values: Sequence[nn.Parameter],
        divisions: Sequence[Division],
        shapes: Sequence[FragmentShape],
        coder: DeviceCoder,
    ) -> None:
        self.coder = coder
        self._shapes = shapes
        self._layouts = [BlockLayout.of(shape) for shape in shapes]
        self._views = ParameterViews(values, [_segments(division) for division in divisions])
        self._lost: dict[int, torch.Tensor] = {}  # by fragment: rounding error of the last write

    def read(self, number: int) -> Callable[[], OnDevice]:
        """Queues a copy of the parameters."""
        values = self.coder.queued(self._read(number))
        return lambda: values

    def whole(self, number: int, anchor: F32) -> OnDevice:
        return self.coder.whole(anchor, self._shapes[number])

    def spread(self, number: int, values: OnDevice) -> Callable[[], OnDevice]:  # noqa: ARG002 - see Values
        """Returns the values, because there are no other ranks."""
        return lambda: values

    def write(self, number: int, values: OnDevice, *, add: bool) -> None:
        wanted = self.coder.await_on_stream(values)
        if add:
            wanted = self._read(number).add_(wanted)
        views = self._views.of(number)
        views.store(segment_values(wanted, self._layouts[number]))
        if views.narrow:
            self._lost[number] = wanted - self._stored(number)
        self.coder.used()

    def sum(self, one: OnDevice, other: OnDevice) -> OnDevice:
        total = self.coder.await_on_stream(one) + self.coder.await_on_stream(other)
        self.coder.used()
        return self.coder.queued(total)

    def forget(self) -> None:
        self._views.forget()

    def _read(self, number: int) -> torch.Tensor:
        """Returns the values without the rounding error of the last write, in new memory."""
        blocks = self._stored(number)
        return blocks.add_(self._lost[number]) if number in self._lost else blocks

    def _stored(self, number: int) -> torch.Tensor:
        blocks = torch.empty(self._layouts[number].blocks, BLOCK, dtype=torch.float32, device=self.coder.device)
        self._views.of(number).load(segment_values(blocks, self._layouts[number]))
        return blocks


def _segments(division: Division) -> list[LocalPiece]:
    """Returns the local pieces of a fragment, cut where its segments end."""
    found, pieces = list[LocalPiece](), iter(division.pieces)
    piece = next(pieces)
    for frame in division.run.frames:
        for segment in frame.segments:
            if segment.offset >= piece.offset + piece.length:
                piece = next(pieces)
            start = piece.start + segment.offset - piece.offset
            found.append(LocalPiece(piece.tensor, start, segment.length, segment.offset))
    return found
