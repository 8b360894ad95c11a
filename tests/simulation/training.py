"""What a simulated learner trains: a model of a few tensors, and an optimizer that walks at random.

The rest is the product's: where its parameters lie (`HostMemory`), how they are moved (`Local`), and what watches them
(`Watch`) is the code of `atoll.Learner`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

import numpy as np
import torch
import torch._dynamo  # `Watch` loads it: here, before a seed has its own clocks and chance
from atoll.boundary.movement import JUDGED_STEPS
from atoll.boundary.optimizer_copies import OptimizerCopies
from atoll_wire.layout.layout import Layout, MergeKind, TensorSpec
from torch import nn

TENSORS = (
    TensorSpec("embedding", (24, 16), "float32", MergeKind.AVERAGE),
    TensorSpec("first", (20, 16), "float32", MergeKind.DIRECTION),
    TensorSpec("second", (16, 30), "float32", MergeKind.DIRECTION),
    TensorSpec("third", (33,), "float32", MergeKind.DIRECTION),
    TensorSpec("fourth", (10, 50), "float32", MergeKind.DIRECTION),
)
STRIDE = 0.01  # of an inner step
SMALL_STRIDE = 0.002  # of a learner with masters: what the others move is large beside it
BATCH = 8  # tokens of an inner step
RELATIVE_ERROR = 0.35  # of int4, in norm: twice what is usual
SLACK = 1.5  # times what is let pass of an adoption that is undone: sizes are estimated at a few places


class Masters(StrEnum):
    """Copies of the parameters that the optimizer keeps, and steps instead."""

    NONE = "none"
    UNKNOWN = "copies that Atoll is not told of"
    NAMED = "copies that it is told of"


class Walk(torch.optim.Optimizer):
    """Adds what it is given; where it has masters, to these, which then become the parameters."""

    def __init__(self, parameters: list[nn.Parameter], masters: Masters) -> None:
        super().__init__(parameters, {})
        self._parameters, self.masters = parameters, masters
        self.copies = [parameter.detach().clone() for parameter in parameters] if masters is not Masters.NONE else []
        self._flat = [each.detach().numpy().reshape(-1) for each in self.copies or parameters]
        self.change: list[tuple[int, int, np.ndarray]] = []  # tensor, where in it, what is added

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One inner step, that torch tells of."""
        self.walk()

    def walk(self) -> None:
        """One inner step."""
        for tensor, start, change in self.change:
            values = self._flat[tensor][start : start + len(change)]
            np.add(values, change, out=values)
        for parameter, copy in zip(self._parameters, self.copies, strict=False):
            parameter.detach().copy_(copy)


class Model:
    """Parameters in torch's memory, and fragments of them."""

    def __init__(self, masters: Masters) -> None:
        self.parameters = [nn.Parameter(torch.zeros(each.shape), requires_grad=False) for each in TENSORS]
        self._flat = [parameter.detach().numpy().reshape(-1) for parameter in self.parameters]
        self.masters = masters

    def begin(self, layout: Layout) -> None:
        """They have their first values."""
        self._layout = layout
        ends = itertools.accumulate(fragment.length for fragment in layout.fragments)
        self._pieces = [
            (piece.tensor, piece.start, end - fragment.length + piece.offset, piece.length)
            for fragment, end in zip(layout.fragments, ends, strict=True)
            for piece in fragment.pieces
        ]
        self.optimizer = Walk(self.parameters, self.masters)
        named = self.masters is Masters.NAMED
        pairs = list(zip(self.parameters, self.optimizer.copies, strict=True)) if named else []
        self.copies = OptimizerCopies([self.optimizer], lambda: pairs)

    def following(self, fragments: Sequence[int], *, restart: bool = False) -> AbstractContextManager[None]:
        """Around a change of these: masters that Atoll knows go with it."""
        if self.masters is not Masters.NAMED:
            return nullcontext()
        tensors = {piece.tensor for fragment in fragments for piece in self._layout.fragments[fragment].pieces}
        return self.copies.following([self.parameters[tensor] for tensor in sorted(tensors)], restart=restart)

    def values(self, fragment: int) -> np.ndarray:
        """A fragment's, as they are."""
        pieces = self._layout.fragments[fragment].pieces
        return np.concatenate([self._flat[p.tensor][p.start : p.start + p.length] for p in pieces])

    def step(self, changes: np.ndarray, *, watched: bool) -> None:
        """One inner step. changes: of one fragment after the other. watched: somebody hears of it."""
        self.optimizer.change = [
            (tensor, start, changes[at : at + length]) for tensor, start, at, length in self._pieces
        ]
        (self.optimizer.step if watched else self.optimizer.walk)()

    def load(self, random: np.random.Generator) -> None:
        """As load_state_dict: values that were not trained here."""
        for values in (*self._flat, *self.optimizer._flat):
            values[:] = random.standard_normal(len(values), np.float32)


class Account:
    """Of one fragment at one process: what training added, and what became of it. float64."""

    def __init__(self, length: int) -> None:
        self.moved = np.zeros(length)  # as a pseudo-gradient counts: anchor - local
        self.told = np.zeros(length)  # merged, or given up
        self.given_up = False  # what is in flight was given up since it was taken
        self.undone = 0.0  # norm of adoptions that masters took back, too small to be found

    def trained(self, change: np.ndarray) -> None:
        """An inner step."""
        np.subtract(self.moved, change, out=self.moved)

    def all_given_up(self, *, flying: bool) -> None:
        """What is outstanding, and what is in flight as well."""
        self.told[:] = self.moved
        self.given_up |= flying

    def ended(self, merged: np.ndarray | None) -> None:
        """What was in flight: merged, or free again."""
        if merged is not None and not self.given_up:
            self.told += merged
        self.given_up = False

    def taken_back(self, size: float, stride: float) -> bool:
        """The next step takes back what moved this fragment. Whether that is much larger than a step: it is found."""
        large = size > SLACK * JUDGED_STEPS * stride * len(self.moved) ** 0.5
        self.undone += 0.0 if large else size
        return large

    def strange(self, sent: np.ndarray) -> str:
        """What is sent that was not trained; empty: nothing, to the error of the codec."""
        work = self.moved - self.told
        off, size = float(np.linalg.norm(sent - work)), float(np.linalg.norm(work))
        allowed = RELATIVE_ERROR * (size + self.undone) + self.undone + 1e-3
        return "" if off <= allowed else f"norm {off:.3g} beside work of norm {size:.3g}"
