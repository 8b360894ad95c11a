"""Applies adoptions to an optimizer's copies of the parameters, such as float32 master weights or averaged weights.

An optimizer that updates its own copies and writes them to the parameters would undo each adoption at its next step.
Atoll detects copies in the state of the learner's optimizers: tensors with a parameter's shape and nearly the same
values. Users must name other copies with the Learner's argument `copies`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from atoll.ranks.placements import local_tensor

Pairs = Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]

NEAR = 0.1  # largest relative distance of a copy from its parameter; a momentum's distance is about 1
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
    )  # whether a state tensor is a copy, by parameter and state key

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

    def found(self, parameters: Sequence[torch.Tensor]) -> set[tuple[int, str]]:
        """Returns (id of the parameter, state key) of each copy in the optimizers' state."""
        self._of(parameters)
        return {place for place, is_copy in self._known.items() if is_copy}

    def told(self, parameters: Sequence[torch.Tensor], copies: Collection[tuple[int, str]]) -> None:
        """Records which state tensors are copies. copies: the result of `found` when the current state was saved."""
        states = [(p, optimizer.state.get(p, {})) for optimizer in self.optimizers for p in parameters]
        self._known = {(id(p), key): (id(p), key) in copies for p, state in states for key in state}

    def _of(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        wanted = {id(parameter) for parameter in parameters}
        pairs = [(p, copy) for p, copy in self.named() if id(p) in wanted]
        taken = {id(copy) for _, copy in pairs}
        for optimizer in self.optimizers:
            for parameter in parameters:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if id(value) not in taken and self._is_copy(parameter, key, value):
                        taken.add(id(value))
                        pairs.append((parameter, value))
        return pairs

    def _is_copy(self, parameter: torch.Tensor, key: str, value: object) -> bool:
        """Returns whether a state tensor is a copy. Compares each tensor only once, because copies diverge later."""
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.is_floating_point():
            return False
        found = self._known.get((id(parameter), key))
        if found is None:
            found = self._known[id(parameter), key] = _near(local_tensor(parameter), local_tensor(value))
        return found


def _near(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether samples of both tensors' values are nearly the same."""
    stride = max(1, parameter.numel() // LOOKED_AT)
    with torch.no_grad():
        ours, theirs = ((t[::stride] if t.dim() else t).float() for t in (parameter, value))
        return bool((theirs.to(ours.device) - ours).norm() < NEAR * ours.norm())
