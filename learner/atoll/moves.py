"""PURE: what moved the parameters: the optimizer, an adoption, or something else. No IO, no threads, no torch.

A row holds the values of some places of the parameters. Rows are read at the end of a step boundary, before and after
the optimizer's step, and at the beginning of the next boundary. Two things show in them:

- written: where neither the optimizer nor an adoption was at work, most places moved by much more than the optimizer's
  usual step. Weights were loaded. Clipping, projections, and averages that are swapped in and out move them less.
- undone: a step moves the parameters back by what an adoption before it had moved them. The optimizer keeps copies of
  the parameters (float32 masters: at the first step) or averages of them (some steps later).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from atoll_wire.blocks import F32
from numpy.typing import NDArray

HISTORY = 32  # steps whose sizes are remembered
RELIABLE = 8  # and how many of them a write behind a step is judged by: the first projection may be large
WRITTEN_STEPS = 8.0  # a place that moved by more usual steps was written
ROUNDINGS = 4.0  # so much of its type's relative rounding may be lost by what is swapped out and in again
JUDGED_STEPS = 4.0  # an adoption is judged when it moved more than so many usual steps
JUDGED_PART = 0.01  # ... or such a part of the values, before a step was seen
UNDONE_AT_ONCE = 0.7  # of an adoption, in the first step: clipped weights may take half of it back
UNDONE_LATER, LATER_STEPS, WATCHED = (
    0.4,
    3.0,
    16,
)  # in a later one, larger than so many usual steps; among so many steps
VOTES, AGAINST = 4, 3  # when of so many adoptions so many are undone, it is no chance


class Verdict(IntEnum):
    """The worst is the largest. UNDONE: an adoption was; COPIES: adoption after adoption is."""

    FINE = 0
    WRITTEN = 1
    UNDONE = 2
    COPIES = 3


@dataclass(frozen=True, slots=True)
class Cycle:
    """From the end of a boundary to the beginning of the next, in numbers of rows.

    before, after: the optimizer's step, or steps; where none was seen, all that happened counts as one. leaving: no
    step was announced, and none will be.
    """

    start: int
    before: int
    after: int
    end: int
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Adoption:
    """Of these fragments, in numbers of rows."""

    before: int
    after: int
    fragments: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Given:
    """An adoption that is watched. change: 0 where it touched nothing. places: bool, which it touched."""

    change: F32
    places: NDArray[np.bool_]
    square: float
    usual: float
    age: int = 0


class Moves:
    """Looks at what happened in its order.

    edges: int64, where each place begins in a row. fragments: int64, of each place. rounding: relative, of its type.
    """

    def __init__(self, edges: NDArray[np.int64], fragments: NDArray[np.int64], rounding: F32) -> None:
        self._edges, self._fragments, self._rounding = edges, fragments, rounding
        self._sizes = np.zeros((HISTORY, len(edges)), np.float32)
        self._steps = 0
        self._usual = np.zeros(len(edges), np.float32)
        self._watched: list[_Given] = []
        self._slack: F32 | None = None  # how far the last boundary moved each place
        self._votes: deque[bool] = deque(maxlen=VOTES)

    def look(self, rows: F32, happened: Sequence[Cycle | Adoption]) -> Verdict:
        """The worst that is seen. rows: float32 (rows, values)."""
        with np.errstate(all="ignore"):  # what is not finite is found, and told, where it is taken
            return self._look(rows, happened)

    def _look(self, rows: F32, happened: Sequence[Cycle | Adoption]) -> Verdict:
        self._learn()
        cycles = [each for each in happened if isinstance(each, Cycle)]
        columns = np.array([(c.start, c.before, c.after, c.end) for c in cycles], np.int64).reshape(-1, 4).T
        moved = rows[columns[3]] - rows[columns[0]]
        whole = self._norms(moved)
        # Most cycles need no closer look, and numpy takes as long for one as for all.
        beside: list[bool] = np.any(
            (rows[columns[0]] != rows[columns[1]]) | (rows[columns[2]] != rows[columns[3]]), axis=1
        ).tolist()
        large: list[bool] = np.any(whole > LATER_STEPS * self._usual, axis=1).tolist()
        worst, number = Verdict.FINE, 0
        for each in happened:
            if isinstance(each, Adoption):
                self._adopted(rows[each.before], rows[each.after], each.fragments)
                continue
            verdict, size = self._beside(rows, each) if beside[number] else (Verdict.FINE, whole[number])
            if verdict is Verdict.FINE and self._watched:
                verdict = self._undone(moved[number], whole[number], later=large[number])
            if verdict < Verdict.UNDONE and not each.leaving:
                self._count(size)
            worst, number, self._slack = max(worst, verdict), number + 1, None
        return worst

    def _beside(self, rows: F32, each: Cycle) -> tuple[Verdict, F32]:
        """Whether the parameters were written beside the optimizer's step; and that step's size."""
        start, before, after, end = rows[[each.start, each.before, each.after, each.end]]
        early, own, late = self._norms(np.stack((before - start, after - before, end - after)))
        size = np.where(own > 0, own, late)  # late: what steps, and then writes by other means
        usual = self._usual if self._steps else size
        written = self._written(early, start, usual)
        if self._steps >= (1 if each.leaving else RELIABLE):
            written |= self._written(late, end, usual)
        return Verdict.WRITTEN if written else Verdict.FINE, size

    def _norms(self, values: F32) -> F32:
        """Of each place. values: (..., values)."""
        return np.sqrt(np.add.reduceat(values * values, self._edges, axis=-1))

    def _learn(self) -> None:
        if self._steps:
            self._usual = np.median(self._sizes[: self._steps], axis=0)

    def _count(self, size: F32) -> None:
        if size.any():
            self._sizes[self._steps % HISTORY] = size
            self._steps += 1
            if self._steps <= RELIABLE:
                self._learn()

    def _written(self, moved: F32, values: F32, usual: F32) -> bool:
        """Whether most places moved by more than they may. moved: their sizes."""
        if not moved.any():
            return False
        allowed = WRITTEN_STEPS * usual + ROUNDINGS * self._rounding * self._norms(values)
        if self._slack is not None:  # a projection goes at most as far as an adoption led away
            allowed = allowed + self._slack
        alive = (moved > 0) | (usual > 0)
        return bool(2 * np.count_nonzero(moved > allowed) > np.count_nonzero(alive))

    def _adopted(self, before: F32, after: F32, fragments: tuple[int, ...]) -> None:
        places = np.isin(self._fragments, fragments)
        change = (after - before) * np.repeat(places, np.diff(self._edges, append=len(after)))
        self._slack = self._norms(change)
        square, usual = float(change @ change), _norm(self._usual[places])
        least = JUDGED_STEPS * usual if self._steps else JUDGED_PART * _norm(self._norms(after)[places])
        if square > least * least:
            self._watched.append(_Given(change, places, square, usual))

    def _undone(self, moved: F32, whole: F32, *, later: bool) -> Verdict:
        """Whether this step took an adoption back. moved, whole: what it moved, and its size in each place.

        later: it may be large enough to take back what is older than a step.
        """
        for given in list(self._watched):
            given.age += 1
            back = 0.0
            if given.age == 1 or (later and _norm(whole[given.places]) > LATER_STEPS * given.usual):
                back = -float(moved @ given.change) / given.square
            undone = back > (UNDONE_AT_ONCE if given.age == 1 else UNDONE_LATER)
            if undone or given.age == WATCHED:
                self._watched.remove(given)
                self._votes.append(undone)
            if undone:
                self._watched.clear()
                return Verdict.COPIES if sum(self._votes) >= AGAINST else Verdict.UNDONE
        return Verdict.FINE


def _norm(values: F32) -> float:
    return float(np.sqrt(np.sum(values * values)))
