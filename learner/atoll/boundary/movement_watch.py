"""Detects when other code writes the parameters: reads a few values around each optimizer step and judges movements.

The watch judges movements before work that contains them is sent. On a device, rows arrive some steps later. A step
boundary does not wait for them. It keeps back the work that it takes until `judged` reaches its number. With several
ranks, rank 0's decision is also carried out at a later boundary, which may contain new movements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from atoll.boundary.movement import Adoption, BoundaryRows, Movement, MovementDetector
from atoll.model.optimizer_hooks import OptimizersOf, listeners
from atoll.model.samples import Block, ParameterSamples, Row

FOUND = {
    Movement.WRITTEN: "something other than the optimizer, such as load_state_dict, wrote the parameters: load weights "
    "outside the learner's block, or replace them temporarily between two steps",
    Movement.UNDONE: "an optimizer step undid an adopted update, perhaps because the optimizer keeps its own copies of "
    "the parameters: if this recurs, pass the copies with Learner(copies=...)",
    Movement.COPIES: "the optimizer undoes adopted updates, because it updates its own copies of the parameters, "
    "such as float32 master weights or averaged weights: pass the copies with "
    "Learner(copies=lambda: [(parameter, copy), ...])",
}

JUDGED_TOGETHER = 32  # number of movements that are judged together while no pseudo-gradient is taken
NONE = -1


class _Change:
    """Context manager for a change to a watch. Starts over if an exception interrupted the last change.

    It is a class, because each idle step uses it.
    """

    __slots__ = ("_begin", "_interrupted")

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin, self._interrupted = begin, False

    def __enter__(self) -> None:
        if self._interrupted:
            self._begin()
        self._interrupted = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._interrupted = kind is not None


class MovementWatch:
    """Watches all optimizers of the process until `end`. Create it before the learner joins, because joining changes
    the parameters."""

    def __init__(self, samples: ParameterSamples) -> None:
        self._samples = samples
        self._optimizers = OptimizersOf(samples.parameters)
        self._whole = _Change(self._begin)
        self.boundary = 0  # number of the newest step boundary
        self._begin()
        listeners.add(self)

    def _begin(self) -> None:
        self._moves = MovementDetector(self._samples.edges, self._samples.fragments, self._samples.rounding)
        self._rows: list[Row] = [self._samples.read()]
        self._happened: list[BoundaryRows | Adoption] = []
        self._waiting: tuple[Block, list[BoundaryRows | Adoption], int] | None = None
        self.judged = self.boundary  # number of the newest step boundary whose movements have been judged
        self._start = 0  # the row at the end of the last boundary
        self._before = self._after = NONE  # the rows around the optimizer's steps since then

    def end(self) -> None:
        """Stops watching and drops all references to the parameters' memory."""
        listeners.remove(self)
        self._samples.forget()

    def forget(self) -> None:
        """Drops all references to the parameters' memory, so that it can be moved or freed."""
        self._samples.forget()

    def adopted(self, fragments: tuple[int, ...], *, reset: bool = False) -> None:
        """Records that a step boundary or joining changed these fragments. reset: whether a bad verdict was the
        reason."""
        with self._whole:
            before, self._start = self._start, self._read()
            self._happened.append(Adoption(before, self._start, fragments, reset))

    def step(self, boundary: int) -> None:
        """Records that a step boundary begins. Starts over if the layout of the parameters' memory has changed.

        boundary: the boundary's number, from 1.
        """
        self.boundary = boundary
        with self._whole:
            if self._samples.settle():
                self._begin()
            else:
                self._cycle(leaving=False)

    def leave(self) -> Movement:
        """Records that the learner leaves. Returns the verdict on all movements."""
        if self._samples.settle():
            self.judged = self.boundary
            return Movement.FINE
        with self._whole:
            self._cycle(leaving=True)
        return self.judge()

    def judge(self) -> Movement:
        """Returns the verdict on all movements. Waits for the device."""
        with self._whole:
            verdict = self._settled()
            self._collect()
            return max(verdict, self._settled())

    def glance(self, *, now: bool) -> Movement:
        """Judges the movements whose rows have arrived, without waiting. Returns the verdict, or FINE if there is none.

        now: whether to begin to judge all other movements too. Otherwise, that begins once there are JUDGED_TOGETHER of
        them.
        """
        with self._whole:
            verdict = self._arrived()
            if self._waiting is None and (now or len(self._happened) >= JUDGED_TOGETHER):
                self._collect()
            return max(verdict, self._arrived())

    def _read(self) -> int:
        self._rows.append(self._samples.read())
        return len(self._rows) - 1

    def _cycle(self, *, leaving: bool) -> None:
        start, end = self._start, self._read()
        before, after = self._before, self._after
        if after == NONE:
            before, after = start, start if leaving else end
        self._happened.append(BoundaryRows(start, before, after, end, leaving))
        self._start = end
        self._before = NONE
        self._after = NONE

    def _collect(self) -> None:
        if self._happened:
            self._waiting = Block(self._rows), self._happened, self.boundary
            self._rows = self._rows[-1:]
            self._happened = []
            self._start = 0

    def _settled(self) -> Movement:
        if self._waiting is None:
            return Movement.FINE
        (block, happened, boundary), self._waiting = self._waiting, None
        verdict = self._moves.look(block.rows(), happened)
        self.judged = boundary
        return verdict

    def _arrived(self) -> Movement:
        return self._settled() if self._waiting is not None and self._waiting[0].there else Movement.FINE

    # ------------------------------------------------------------------------------ called around optimizers' steps

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of any optimizer in this process."""
        if self._before == NONE and self._has(optimizer):
            self._before = self._read()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer in this process."""
        if self._before == NONE or not self._has(optimizer):
            return
        if self._after == NONE:
            self._after = self._read()
        else:  # several optimizers or steps: use the last row
            self._rows[self._after] = self._samples.read()

    def _has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether an optimizer updates sampled parameters.

        Returns False during CUDA graph capture, because replays call no hooks.
        """
        return not self._samples.recorded() and self._optimizers.includes(optimizer)
