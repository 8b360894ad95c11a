"""Sees what moves the parameters beside this learner: reads them around each step of the optimizer, and judges in time.

In time is before anything is taken. A device is not waited for until then: rows are copied beside its work.
"""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from atoll.boundary.movement import Adoption, Cycle, Moves, Verdict
from atoll.boundary.samples import Block, Row, Samples

FOUND = {
    Verdict.WRITTEN: "the parameters were written by something other than the optimizer, such as load_state_dict: load "
    "weights before entering the learner, swap others in between two steps only, restore the best after leaving",
    Verdict.UNDONE: "a step moved the parameters back by what was adopted before it",
    Verdict.COPIES: "the optimizer undoes what is adopted: it keeps copies of the parameters (float32 masters, slow or "
    "averaged weights), and steps those; name them: Learner(copies=lambda: [(parameter, its copy), ...])",
}

AT_ONCE = 32  # boundaries that are judged together where nothing is taken
NONE = -1


class Watch:
    """Begins before entering gives the parameters other values; hears optimizers until `end`."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._mine: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()
        self._last: torch.optim.Optimizer | None = None  # that it is mine is known
        self._begin()
        _listeners.add(self)

    def _begin(self) -> None:
        self._moves = Moves(self._samples.edges, self._samples.fragments, self._samples.rounding)
        self._rows: list[Row] = [self._samples.read()]
        self._happened: list[Cycle | Adoption] = []
        self._waiting: tuple[Block, list[Cycle | Adoption]] | None = None
        self._start = 0  # the row at the end of the last boundary
        self._before = self._after = NONE  # the rows around the optimizer's steps since then

    def end(self) -> None:
        """Hears nothing more, and lets go of the parameters."""
        _listeners.remove(self)
        self._samples.forget()

    def forget(self) -> None:
        """Lets go of the parameters' memory: it can be moved or freed."""
        self._samples.forget()

    def adopted(self, fragments: tuple[int, ...]) -> None:
        """A boundary, or entering, gave these fragments other values."""
        before, self._start = self._start, self._read()
        self._happened.append(Adoption(before, self._start, fragments))

    def step(self) -> None:
        """A boundary begins."""
        if self._samples.settle():
            self._begin()
        else:
            self._cycle(leaving=False)

    def leave(self) -> Verdict:
        """There is no further boundary. On all that happened."""
        if self._samples.settle():
            return Verdict.FINE
        self._cycle(leaving=True)
        return self.judge()

    def judge(self) -> Verdict:
        """On all that happened; waits for a device."""
        verdict = self._settled()
        self._collect()
        return max(verdict, self._settled())

    def glance(self) -> Verdict:
        """On what needs no waiting, when it is enough to be looked at together."""
        if self._waiting is None and len(self._happened) >= AT_ONCE:
            self._collect()
        return self._settled() if self._waiting is not None and self._waiting[0].there else Verdict.FINE

    def _read(self) -> int:
        self._rows.append(self._samples.read())
        return len(self._rows) - 1

    def _cycle(self, *, leaving: bool) -> None:
        start, end = self._start, self._read()
        before, after = self._before, self._after
        if after == NONE:
            before, after = start, start if leaving else end
        self._happened.append(Cycle(start, before, after, end, leaving))
        self._start = end
        self._before = NONE
        self._after = NONE

    def _collect(self) -> None:
        if self._happened:
            self._waiting = Block(self._rows), self._happened
            self._rows = self._rows[-1:]
            self._happened = []
            self._start = 0

    def _settled(self) -> Verdict:
        if self._waiting is None:
            return Verdict.FINE
        (block, happened), self._waiting = self._waiting, None
        return self._moves.look(block.rows(), happened)

    # ------------------------------------------------------------------------------ called around optimizers' steps

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of this process, mine or not, begins a step."""
        if self._before == NONE and self._has(optimizer):
            self._before = self._read()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has made the step."""
        if self._before == NONE or not self._has(optimizer):
            return
        if self._after == NONE:
            self._after = self._read()
        else:  # several optimizers, or several steps: the last counts
            self._rows[self._after] = self._samples.read()

    def _has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it updates what is read here, and not while a CUDA graph records it: replayed, it calls nobody."""
        if self._samples.recorded():
            return False
        if optimizer is self._last:
            return True
        found = self._mine.get(optimizer)
        if found is None:
            mine = {id(parameter) for parameter in self._samples.parameters}
            found = any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
            self._mine[optimizer] = found
        if found:
            self._last = optimizer
        return found


class _Listeners:
    """Hear each step of each optimizer in this process.

    torch keeps such hooks in a dictionary, which a thread that steps iterates over: they are set once, and stay.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooked = False
        self._all: tuple[Watch, ...] = ()

    def add(self, watch: Watch) -> None:
        with self._lock:
            if not self._hooked:
                register_optimizer_step_pre_hook(torch.compiler.disable(self._stepping))
                register_optimizer_step_post_hook(torch.compiler.disable(self._stepped))
                self._hooked = True
            self._all = (*self._all, watch)

    def remove(self, watch: Watch) -> None:
        with self._lock:
            self._all = tuple(other for other in self._all if other is not watch)

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for watch in self._all:
            watch.stepping(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for watch in self._all:
            watch.stepped(optimizer)


_listeners = _Listeners()
