"""Recognises calls of `Learner.step` for which a gradient scaler skipped the optimizer's step.

A scaler skips a step if a gradient is infinite or NaN. It then does not call the optimizer, or it tells a fused
optimizer to change nothing, by setting `found_inf`. With gradient accumulation, calls after each
micro-batch look the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from atoll.model.optimizer_hooks import OptimizersOf, listeners

LOOKED_AT = 8  # number of parameters whose version counters are compared


class SkippedSteps:
    """Watches the optimizers of these parameters until `end`.

    A call counts as skipped only if this learner's optimizer steps are visible. A torch optimizer calls hooks, but a
    replayed CUDA graph does not.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizers = OptimizersOf(parameters)
        self._parameters = parameters[:LOOKED_AT]
        self._visible: bool | None = None  # None: no step has been seen yet
        self._taken = 0  # steps that no scaler has marked, since the last call
        self._marked: list[torch.Tensor] = []  # found_inf of the other steps since the last call
        self._versions: list[int] = []

    def begin(self) -> None:
        """Begins to watch. Call this once the parameters have the run's values."""
        self.settled()
        listeners.add(self)

    def end(self) -> None:
        """Stops watching."""
        listeners.remove(self)

    def skipped(self) -> bool:
        """Returns whether all optimizer steps since the last call were skipped. Waits for the device only after a step
        of a fused optimizer with a gradient scaler."""
        taken, marked = self._taken, self._marked
        self._taken, self._marked = 0, []
        if not self._visible or taken:
            return False
        if marked:
            return all(bool(found.item()) for found in marked)
        return self._versions == self._now()

    def settled(self) -> None:
        """Records that Atoll's own changes to the parameters are complete."""
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any optimizer in this process."""
        if not self._optimizers.includes(optimizer):
            return
        if self._parameters[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._visible = False  # the graph's replays call no hooks
            return
        if self._visible is None:
            self._visible = True
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, torch.Tensor):
            self._marked.append(found)
        else:
            self._taken += 1

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer in this process."""
