"""A rank's values on the device of its parameters, and their exchange with the other ranks.

The training thread only queues work. It begins all exchanges, because all ranks must begin them in the same order. To
take a pseudo-gradient, it copies and sends values on the training stream. The coder's stream receives them. To adopt an
anchor, the coder's stream sends changes. The training stream receives and adds them at a later step.

For types narrower than float32, this module keeps the rounding error of each fragment's last write on the device, as
`host_memory` does in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from atoll_wire.codec.block_kernels import F32
from torch import nn

from atoll.device.device_coder import DeviceCoder, OnDevice, copy_all
from atoll.fragments.segments import FragmentShape
from atoll.model.parameter_views import ParameterViews
from atoll.ranks.division import Division, Grid, Moves
from atoll.ranks.rank_group import RankGroup


class DeviceValues:
    """A rank's values as vectors on a device. See `local_parameters.Values`.

    values: trainable parameters in the order of the layout's tensors, all on the coder's device.
    divisions: this rank's division of each fragment.
    """

    def __init__(
        self, values: Sequence[nn.Parameter], divisions: Sequence[Division], coder: DeviceCoder, ranks: RankGroup
    ) -> None:
        self.coder = coder
        self._ranks = ranks
        self._routes = [_Routes.of(division) for division in divisions]
        self._views = ParameterViews(values, [division.pieces for division in divisions])
        self._lost: dict[int, torch.Tensor] = {}  # rounding error of the last write, by fragment

    def read(self, number: int) -> Callable[[], OnDevice]:
        """Queues a copy of the parameters and the exchange of this copy."""
        routes, division = self._routes[number], self._routes[number].division
        given = routes.given.collected(self._read(number))
        copied = self.coder.queued(given)
        received = self._ranks.exchange(given, division.given.counts, division.owned.counts)

        def arrived() -> OnDevice:
            with self.coder.beside():
                self.coder.await_on_stream(copied)
                buffer = received()
                return self.coder.queued(routes.owned.placed(buffer), given, buffer)

        return arrived

    def located(self, number: int, shape: FragmentShape) -> None:
        """Returns None, because the values change on the device while the coder waits for it."""

    def whole(self, number: int, anchor: F32) -> OnDevice:  # noqa: ARG002 - see Values
        return self.coder.whole(anchor)

    def spread(self, number: int, values: OnDevice) -> Callable[[], torch.Tensor]:
        """Queues an exchange. The training stream waits for the result, but this thread does not."""
        routes, division = self._routes[number], self._routes[number].division
        with self.coder.beside():
            given = self.coder.queued(routes.spread.collected(self.coder.await_on_stream(values)))
            received = self._ranks.exchange(given.vector, division.spread.counts, division.held.counts)

        def arrived() -> torch.Tensor:
            self.coder.await_on_stream(given)
            return received()

        return arrived

    def write(self, number: int, values: torch.Tensor, *, add: bool) -> None:
        wanted = self._routes[number].held.placed(values)
        if add:
            wanted = self._read(number).add_(wanted)
        views = self._views.of(number)
        views.store(self._pieces(number, wanted))
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
        vector = self._stored(number)
        return vector.add_(self._lost[number]) if number in self._lost else vector

    def _stored(self, number: int) -> torch.Tensor:
        length = self._routes[number].division.local_length
        vector = torch.empty(length, dtype=torch.float32, device=self.coder.device)
        self._views.of(number).load(self._pieces(number, vector))
        return vector

    def _pieces(self, number: int, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of each piece in a local vector."""
        return list(vector.split([piece.length for piece in self._routes[number].division.pieces]))


@dataclass(frozen=True, slots=True)
class _Route:
    """The route between a vector and a message buffer. same: whether the two are identical."""

    length: int
    size: int
    same: bool
    grids: list[Grid]

    @classmethod
    def of(cls, moves: Moves, length: int) -> _Route:
        """length: number of values in the vector."""
        same = moves.size == length and np.array_equal(moves.places, moves.starts)
        return cls(length, moves.size, same, [] if same else moves.grids())

    def collected(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the message buffer, or the vector itself if the two are identical."""
        if self.same:
            return vector
        buffer = torch.empty(self.size, dtype=torch.float32, device=vector.device)
        copy_all(self._in_buffer(buffer), self._in_vector(vector))
        return buffer

    def placed(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the vector with the values of a message buffer: the inverse of `collected`."""
        if self.same:
            return buffer
        vector = torch.empty(self.length, dtype=torch.float32, device=buffer.device)
        copy_all(self._in_vector(vector), self._in_buffer(buffer))
        return vector

    def _in_vector(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [vector.as_strided((each.count, each.length), (each.step, 1), each.place) for each in self.grids]

    def _in_buffer(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer.as_strided((each.count, each.length), (each.length, 1), each.start) for each in self.grids]


@dataclass(frozen=True, slots=True)
class _Routes:
    """A division with the routes between its vectors and message buffers."""

    division: Division
    given: _Route
    owned: _Route
    spread: _Route
    held: _Route

    @classmethod
    def of(cls, division: Division) -> _Routes:
        local, run = division.local_length, division.run.length
        return cls(
            division,
            _Route.of(division.given, local),
            _Route.of(division.owned, run),
            _Route.of(division.spread, run),
            _Route.of(division.held, local),
        )
