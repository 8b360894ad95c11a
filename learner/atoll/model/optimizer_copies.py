"""Applies adoptions to an optimizer's copies of the parameters, such as float32 master weights or averaged weights.

An optimizer that updates its own copies and writes them to the parameters would undo each adoption at its next step.
Atoll detects copies in the state of the learner's optimizers: all tensors with one key are copies if they have their
parameters' shapes and nearly the same values. Users must name other copies with the Learner's argument `copies`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from atoll.ranks.placements import local_tensor

Pairs = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]

NEAR = 0.1  # largest relative distance of copies from their parameters; a momentum's distance is about 1
MIN_VALUES = 8  # a few values of a momentum may be near their parameters by chance
LOOKED_AT = 4096  # number of values per tensor that are compared


@dataclass(slots=True)
class OptimizerCopies:
    """Finds an optimizer's copies of parameters, and applies the parameters' changes to them.

    named: a function that returns (parameter, copy) pairs. It is called for each change, because optimizers create
    their state late.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    named: Pairs = tuple
    _known: dict[tuple[int, str], bool] = field(
        default_factory=dict
    )  # whether state tensors are copies, by number of the optimizer and state key

    @contextlib.contextmanager
    def following(self, parameters: Sequence[torch.Tensor], *, restart: bool = False) -> Iterator[None]:
        """Context manager whose block changes the parameters. Afterwards, it applies the same change to the copies.

        restart: whether to set the copies equal to the parameters instead.
        """
        pairs = [(local_tensor(parameter), local_tensor(copy)) for parameter, copy in self._of(parameters)]
        before = [None if restart else parameter.clone() for parameter, _ in pairs]
        yield
        with torch.no_grad():
            for (parameter, copy), old in zip(pairs, before, strict=True):
                if old is None:
                    copy.copy_(parameter)
                else:
                    copy.add_(parameter.to(copy.device, copy.dtype) - old.to(copy.device, copy.dtype))

    def found(self) -> list[tuple[int, str]]:
        """Returns (number of the optimizer, state key) of the copies in the optimizers' state."""
        states = [(number, state) for number, each in enumerate(self.optimizers) for state in each.state.values()]
        keys = dict.fromkeys((number, key) for number, state in states for key in state)
        return [(number, key) for number, key in keys if self._are_copies(number, key)]

    def told(self, copies: Collection[tuple[int, str]]) -> None:
        """Records which state tensors are copies. copies: the result of `found` when the current state was saved."""
        states = [(number, state) for number, each in enumerate(self.optimizers) for state in each.state.values()]
        self._known = {(number, key): (number, key) in copies for number, state in states for key in state}

    def _of(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        wanted = {id(parameter) for parameter in parameters}
        pairs = [(p, copy) for p, copy in self.named() if id(p) in wanted]
        taken = {id(copy) for _, copy in pairs}
        for number, optimizer in enumerate(self.optimizers):
            for parameter in parameters:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if id(value) not in taken and _may_be_copy(parameter, value) and self._are_copies(number, key):
                        taken.add(id(value))
                        pairs.append((parameter, value))
        return pairs

    def _are_copies(self, number: int, key: str) -> bool:
        """Returns whether an optimizer's state tensors with this key are copies of their parameters.

        Compares all of them together, because one small tensor may be near by chance. Compares them only once, because
        copies diverge later.
        """
        found = self._known.get((number, key))
        if found is None:
            rows = [(p, state[key]) for p, state in self.optimizers[number].state.items() if key in state]
            pairs = [(local_tensor(p), local_tensor(value)) for p, value in rows if _may_be_copy(p, value)]
            found = self._known[number, key] = _near(pairs)
        return found


def _may_be_copy(parameter: torch.Tensor, value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == parameter.shape and value.is_floating_point()


def _near(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Returns whether samples of the parameters' and the state tensors' values are nearly the same."""
    distance_sq = norm_sq = 0.0
    values = 0
    with torch.no_grad():
        for pair in pairs:
            stride = max(1, pair[0].numel() // LOOKED_AT)
            ours, theirs = ((t[::stride] if t.dim() else t).float() for t in pair)
            distance_sq += float((theirs.to(ours.device) - ours).square().sum())
            norm_sq += float(ours.square().sum())
            values += ours.numel()
    return values >= MIN_VALUES and distance_sq < NEAR**2 * norm_sq
