"""Compares replicas: the parts of parameters that several ranks hold, as with DDP, HSDP or tensor parallelism.

Replicas should stay identical. They drift apart if, for example, the program does not average the gradients of a
parameter, or writes it on one rank. A pseudo-gradient would then describe a mixture of models that no rank has.
Therefore, ranks compare samples whenever they take a pseudo-gradient. The comparison is part of their agreements.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from atoll_wire.layout.layout import FragmentLayout
from torch import nn

from atoll.model.samples import Block, view
from atoll.ranks.division import Division
from atoll.ranks.placements import local_tensor
from atoll.ranks.tensor_part import TensorPart

MAX_PIECES = 32  # limit on the sampled pieces of a fragment, the largest ones
VALUES = 8  # values that are sampled of each piece

DRIFTED = (
    "the ranks of this learner held different values of the same parameters: average the gradients of all parameters, "
    "and change parameters on all ranks alike"
)


@dataclass(frozen=True, slots=True)
class _Sample:
    """The sampled values of a fragment. number: from 1, the same on all ranks."""

    number: int
    fragment: int
    block: Block | None  # None if this rank holds no replica


class ReplicaCheck:
    """One rank's part in comparisons of replicas. All ranks read the same fragments in the same order.

    values: trainable parameters in the order of the layout. divisions: this rank's division of each fragment.
    parts: every rank's part of each tensor, by rank and tensor. rank: number of this rank.
    """

    def __init__(
        self,
        values: Sequence[nn.Parameter],
        divisions: Sequence[Division],
        parts: Sequence[Sequence[TensorPart]],
        rank: int,
    ) -> None:
        self._values = values
        self._sets = [_sets(division.fragment, parts) for division in divisions]
        self._places = [_places(values, each, _replicas(each.fragment, parts, rank)) for each in divisions]
        self._count = 0
        self._waiting = deque[_Sample]()

    def read(self, fragment: int) -> None:
        """Reads the samples of a fragment, without waiting for the device.

        Does nothing if no rank holds replicas. Also does nothing if earlier samples of the fragment are not compared
        yet: one agreement compares one fragment, but several rounds may be due.
        """
        if not self._sets[fragment] or any(each.fragment == fragment for each in self._waiting):
            return
        with torch.no_grad():
            rows = [view(local_tensor(self._values[tensor]), start, VALUES) for tensor, start in self._places[fragment]]
            block = Block([torch.cat(rows)]) if rows else None
        self._count += 1
        self._waiting.append(_Sample(self._count, fragment, block))

    def report(self) -> int:
        """Returns the number and the checksum of the oldest sample that is not compared, or 0 if it is not available.

        The checksum is in the lower 32 bits.
        """
        if not self._waiting:
            return 0
        oldest = self._waiting[0]
        if oldest.block is None:
            return oldest.number << 32
        return oldest.number << 32 | zlib.crc32(oldest.block.rows().tobytes()) if oldest.block.there else 0

    def drifted(self, reports: Sequence[int]) -> int | None:
        """Returns the fragment whose replicas differ, or None. reports: the result of `report` on each rank."""
        if not self._waiting or {report >> 32 for report in reports} != {self._waiting[0].number}:
            return None  # a device has not computed some values yet: the ranks report this sample again
        fragment = self._waiting.popleft().fragment
        differ = any(len({reports[rank] for rank in same}) > 1 for same in self._sets[fragment])
        return fragment if differ else None


def _replicas(fragment: FragmentLayout, parts: Sequence[Sequence[TensorPart]], rank: int) -> tuple[int, ...]:
    """Returns the tensors of a fragment of which another rank holds the same part."""
    return tuple(
        piece.tensor
        for piece in fragment.pieces
        if sum(other[piece.tensor] == parts[rank][piece.tensor] for other in parts) > 1
    )


def _sets(fragment: FragmentLayout, parts: Sequence[Sequence[TensorPart]]) -> list[list[int]]:
    """Returns the sets of ranks whose replicas are all the same. A rank without replicas is in no set."""
    found: dict[tuple[tuple[int, TensorPart], ...], list[int]] = {}
    for rank, mine in enumerate(parts):
        key = tuple((tensor, mine[tensor]) for tensor in _replicas(fragment, parts, rank))
        if key:
            found.setdefault(key, []).append(rank)
    return [ranks for ranks in found.values() if len(ranks) > 1]


def _places(values: Sequence[nn.Parameter], division: Division, replicas: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the sampled places of a fragment: tensor, and first element in this rank's part."""
    device = values[0].device
    pieces = [each for each in division.pieces if each.tensor in replicas and values[each.tensor].device == device]
    largest = sorted(pieces, key=lambda piece: -piece.length)[:MAX_PIECES]
    return [(piece.tensor, piece.start + piece.length // 2) for piece in largest]
