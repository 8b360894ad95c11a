"""A rank's values in host memory, and their exchange with the other ranks.

The code calls torch and numpy as rarely as possible, because each call releases the GIL. A busy thread that acquires
the GIL then keeps it for `sys.getswitchinterval()` seconds. If the parameters are float32 and on the host, reading and
writing a fragment release the GIL once each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from atoll_wire.codec import buffers
from atoll_wire.codec.block_kernels import F32
from torch import nn

from atoll.boundary.host_memory import HostMemory
from atoll.fragments import in_place, segments
from atoll.fragments.in_place import CodedSum, Located
from atoll.fragments.segments import I64, Coder, FragmentShape
from atoll.ranks.division import Division, Moves
from atoll.ranks.rank_group import RankGroup


def host_coder(ranks: RankGroup) -> Coder:
    """Returns the coder for parameters in host memory."""
    return in_place if ranks.size == 1 else segments


class HostValues:
    """A rank's values as float32 vectors in host memory. See `local_parameters.Values`.

    values: trainable parameters in the order of the layout's tensors. divisions: this rank's division of each fragment.
    """

    def __init__(self, values: Sequence[nn.Parameter], divisions: Sequence[Division], ranks: RankGroup) -> None:
        self._memory = HostMemory(values, [division.pieces for division in divisions])
        self.coder = host_coder(ranks)
        self._ranks = ranks
        self._routes = [_Routes.of(division) for division in divisions]

    def read(self, number: int) -> Callable[[], F32]:
        routes = self._routes[number]
        given = buffers.empty(routes.division.given.size)
        segments.gather(routes.given.starts(self._memory.read(number)), routes.given.rows, given)
        received = self._ranks.exchange(given, routes.division.given.counts, routes.division.owned.counts)
        return lambda: _placed(received(), routes.division.owned, routes.division.run.length)

    def located(self, number: int, shape: FragmentShape) -> Located | None:
        if self._ranks.size > 1:
            return None
        return Located(self._routes[number].segments(shape, self._memory.read(number)))

    def whole(self, number: int, anchor: F32) -> F32:  # noqa: ARG002 - see Values
        """Returns the anchor itself."""
        return anchor

    def spread(self, number: int, values: F32 | CodedSum) -> Callable[[], F32 | CodedSum]:
        if isinstance(values, CodedSum):
            return lambda: values
        division = self._routes[number].division
        given = _collected(values, division.spread)
        return self._ranks.exchange(given, division.spread.counts, division.held.counts)

    def write(self, number: int, values: F32 | CodedSum, *, add: bool) -> None:
        routes, addresses = self._routes[number], self._memory.read(number)
        if isinstance(values, CodedSum):
            assert add, "an anchor is a vector"
            values.add_to(routes.segments(values.shape, addresses))
        else:
            held = routes.held
            (segments.add if add else segments.store)(values, held.starts(addresses), held.rows)
        self._memory.write(number)

    def sum(self, one: F32, other: F32 | CodedSum) -> F32:
        return one + (other.vector() if isinstance(other, CodedSum) else other)

    def forget(self) -> None:
        self._memory.forget()


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of a local vector in a message buffer.

    pieces: the piece that contains each run. offsets: the bytes from the start of that piece to the run. rows: each
    run's position in the buffer and its length.
    """

    pieces: I64
    offsets: I64
    rows: I64

    @classmethod
    def of(cls, division: Division, places: I64, rows: I64) -> _Runs:
        """places: position of each run in the local vector."""
        first = np.array([piece.offset for piece in division.pieces], np.int64)
        pieces = np.searchsorted(first, places, side="right") - 1
        return cls(pieces, 4 * (places - first[pieces]), rows)

    @classmethod
    def moved(cls, division: Division, moves: Moves) -> _Runs:
        """Returns the runs of a message."""
        return cls.of(division, moves.places, np.stack([moves.starts, moves.lengths], axis=1))

    def starts(self, addresses: I64) -> I64:
        """Returns the address of each run. addresses: the address of each piece."""
        return addresses[self.pieces] + self.offsets


@dataclass(frozen=True, slots=True)
class _Routes:
    """A division with the arguments of the kernels that copy its values."""

    division: Division
    given: _Runs
    held: _Runs

    @classmethod
    def of(cls, division: Division) -> _Routes:
        return cls(division, _Runs.moved(division, division.given), _Runs.moved(division, division.held))

    def segments(self, shape: FragmentShape, addresses: I64) -> I64:
        """Returns the address of each segment of a shape, whose run is the local vector. addresses: of each piece."""
        return _Runs.of(self.division, shape.rows[:, 0], shape.rows).starts(addresses)


def _collected(vector: F32, moves: Moves) -> F32:
    """Returns a message buffer with the moved values of a vector, or the vector itself if the buffer would be
    identical."""
    if moves.is_all_of(len(vector)):
        return vector
    out = buffers.empty(moves.size)
    segments.gather(vector.ctypes.data + 4 * moves.places, np.stack([moves.starts, moves.lengths], axis=1), out)
    return out


def _placed(buffer: F32, moves: Moves, length: int) -> F32:
    """Returns a vector with the values of a message buffer: the inverse of `_collected`."""
    if moves.is_all_of(length):
        return buffer
    out = buffers.empty(length)
    segments.store(buffer, out.ctypes.data + 4 * moves.places, np.stack([moves.starts, moves.lengths], axis=1))
    return out
