"""Calls listeners around each optimizer step in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Listener(Protocol):
    """An object that observes optimizer steps."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any optimizer in this process."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer in this process."""


class OptimizersOf:
    """Recognises the optimizers that update any of the given parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._known: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._last: torch.optim.Optimizer | None = None  # the last optimizer that was recognised

    def includes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether an optimizer updates any of the parameters."""
        if optimizer is self._last:
            return True
        found = self._known.get(optimizer)
        if found is None:
            found = any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])
            self._known[optimizer] = found
        if found:
            self._last = optimizer
        return found


class _Listeners:
    """The listeners of this process.

    The hooks are set once and never removed, because optimizer steps in other threads may be iterating over torch's
    dictionary of hooks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooked = False
        self._all: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> None:
        with self._lock:
            if not self._hooked:
                register_optimizer_step_pre_hook(torch.compiler.disable(self._stepping))
                register_optimizer_step_post_hook(torch.compiler.disable(self._stepped))
                self._hooked = True
            self._all = (*self._all, listener)

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._all = tuple(other for other in self._all if other is not listener)

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for listener in self._all:
            listener.stepping(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for listener in self._all:
            listener.stepped(optimizer)


listeners = _Listeners()
