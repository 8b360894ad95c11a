"""The training of a simulated learner: a model of a few tensors, and an optimizer with random steps.

The rest is the product's code: its parameters' memory (`HostMemory`), their movement (`LocalParameters`), and the
detection of other movements (`MovementWatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
import torch._dynamo  # imported before a seed replaces clock and random numbers
from atoll.boundary.movement import JUDGED_STEPS
from atoll.model.optimizer_copies import OptimizerCopies
from atoll.ranks.division import Division
from atoll.ranks.tensor_part import TensorPart
from atoll_wire.layout.layout import FragmentLayout, MergeKind, TensorSpec
from torch import nn

from tests.simulation.ranks import places_of

TENSORS = (
    TensorSpec("embedding", (24, 16), "float32", MergeKind.AVERAGE),
    TensorSpec("first", (20, 16), "float32", MergeKind.DIRECTION),
    TensorSpec("second", (16, 30), "float32", MergeKind.DIRECTION),
    TensorSpec("third", (33,), "float32", MergeKind.DIRECTION),
    TensorSpec("fourth", (10, 50), "float32", MergeKind.DIRECTION),
)
STRIDE = 0.01  # size of an inner step
SMALL_STRIDE = 0.002  # stride of a learner with masters, so that adoptions are relatively large
BATCH = 8  # tokens of an inner step
RELATIVE_ERROR = 0.35  # bound on int4's relative error in norm: twice the usual error
SLACK = 1.5  # the watch estimates sizes from few values


class Masters(StrEnum):
    """Copies of the parameters that the optimizer steps instead of the parameters."""

    NONE = "none"
    UNKNOWN = "copies that Atoll is not told of"
    NAMED = "copies that it is told of"


class Walk(torch.optim.Optimizer):
    """An optimizer that adds given values. With masters, it adds to these and copies them to the parameters."""

    def __init__(self, parameters: list[nn.Parameter], masters: Masters) -> None:
        super().__init__(parameters, {})
        self._parameters, self.masters = parameters, masters
        self.copies = [parameter.detach().clone() for parameter in parameters] if masters is not Masters.NONE else []
        self._flat = [each.detach().numpy().reshape(-1) for each in self.copies or parameters]
        self.change: list[tuple[int, int, np.ndarray]] = []  # tensor, start in it, added values

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes one inner step, with torch's optimizer hooks."""
        self.walk()

    def walk(self) -> None:
        """Takes one inner step."""
        for tensor, start, change in self.change:
            values = self._flat[tensor][start : start + len(change)]
            np.add(values, change, out=values)
        for parameter, copy in zip(self._parameters, self.copies, strict=False):
            parameter.detach().copy_(copy)


class Model:
    """One rank's parameters in torch's memory, and their fragments. parts: the rank's part of each tensor.

    It is also the `Parameters` of the step boundary.
    """

    def __init__(self, masters: Masters, parts: Sequence[TensorPart]) -> None:
        self.values = [nn.Parameter(torch.zeros(part.local_shape), requires_grad=False) for part in parts]
        self._flat = [parameter.detach().numpy().reshape(-1) for parameter in self.values]
        self.masters, self._parts = masters, parts

    def begin(self, divisions: Sequence[Division]) -> None:
        """Sets the first values."""
        self._divisions = divisions
        self._places = [places_of(division, self._parts) for division in divisions]
        self.optimizer = Walk(self.values, self.masters)
        named = self.masters is Masters.NAMED
        pairs = list(zip(self.values, self.optimizer.copies, strict=True)) if named else []
        known = [self.optimizer] if self.masters is Masters.NAMED else []
        self.copies = OptimizerCopies(known, lambda: pairs)

    def of(self, fragment: FragmentLayout) -> list[nn.Parameter]:
        """See Parameters."""
        return [self.values[number] for number in sorted({piece.tensor for piece in fragment.pieces})]

    def check_unchanged(self) -> None:
        """See Parameters."""

    def reshard(self) -> None:
        """See Parameters."""

    def put(self, fragment: int, into: np.ndarray) -> None:
        """Writes this rank's values of a fragment to their places in the fragment's vector."""
        pieces = [self._flat[p.tensor][p.start : p.start + p.length] for p in self._divisions[fragment].pieces]
        if pieces:
            into[self._places[fragment]] = np.concatenate(pieces)

    def step(self, changes: Sequence[np.ndarray], *, watched: bool) -> None:
        """Takes one inner step. changes: per fragment's vector. watched: whether to call torch's hooks."""
        self.optimizer.change = []
        for change, places, division in zip(changes, self._places, self._divisions, strict=True):
            mine = change[places]
            for piece in division.pieces:
                part = mine[piece.offset : piece.offset + piece.length]
                self.optimizer.change.append((piece.tensor, piece.start, part))
        (self.optimizer.step if watched else self.optimizer.walk)()

    def load(self, values: Sequence[np.ndarray]) -> None:
        """Loads untrained values, like load_state_dict. values: of each fragment's vector."""
        for whole, places, division in zip(values, self._places, self._divisions, strict=True):
            mine = whole[places]
            for piece in division.pieces:
                part = mine[piece.offset : piece.offset + piece.length]
                for flat in (self._flat, self.optimizer._flat):
                    flat[piece.tensor][piece.start : piece.start + len(part)] = part


class Account:
    """One fragment's trained movement in one process, and its fate. In float64."""

    def __init__(self, length: int) -> None:
        self.moved = np.zeros(length)  # sign as in a pseudo-gradient: anchor - local
        self.told = np.zeros(length)  # merged or dropped
        self.given_up = False  # whether the work in flight was dropped after it was taken
        self.undone = 0.0  # norm of adoptions that masters undid, too small to be detected

    def trained(self, change: np.ndarray) -> None:
        """Adds an inner step."""
        np.subtract(self.moved, change, out=self.moved)

    def all_given_up(self, *, flying: bool) -> None:
        """Drops the outstanding work. flying: whether to drop the work in flight, too."""
        self.told[:] = self.moved
        self.given_up |= flying

    def ended(self, merged: np.ndarray | None) -> None:
        """Ends the flight of a contribution. merged: its values, or None if it was refused."""
        if merged is not None and not self.given_up:
            self.told += merged
        self.given_up = False

    def taken_back(self, size: float, stride: float) -> bool:
        """Records that the next step undoes a movement.

        Returns whether the movement is much larger than a step, and thus detectable.
        """
        large = size > SLACK * JUDGED_STEPS * stride * len(self.moved) ** 0.5
        self.undone += 0.0 if large else size
        return large

    def taken(self, after: int, upto: int) -> Take:
        """Returns what a contribution contains that is taken now. after, upto: see Take."""
        return Take(self.moved - self.told, self.undone, after, upto)


@dataclass(slots=True)
class Take:
    """What a contribution must contain, recorded when it was taken.

    work: float64, outstanding work of the fragment. undone: see Account. after, upto: it has the steps above `after` up
    to `upto`. handed_over: whether the boundary has passed it to the agent.
    """

    work: np.ndarray
    undone: float
    after: int
    upto: int
    handed_over: bool = False

    def strange(self, sent: np.ndarray) -> str:
        """Returns a description of sent values that were not trained, or an empty string if there are none."""
        off, size = float(np.linalg.norm(sent - self.work)), float(np.linalg.norm(self.work))
        allowed = RELATIVE_ERROR * (size + self.undone) + self.undone + 1e-3
        return "" if off <= allowed else f"differs by norm {off:.3g} from work of norm {size:.3g}"
