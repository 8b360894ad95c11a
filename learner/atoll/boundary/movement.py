"""PURE: what moved the parameters: the optimizer, an adoption, or something else. No IO, no threads, no torch.

A row holds the values of some places of the parameters. Rows are read at the end of a step boundary, before and after
the optimizer's step, and at the beginning of the next boundary. Two things show in them:

- written: where neither the optimizer nor an adoption was at work, most places moved by much more than the optimizer's
  usual step. Weights were loaded. Clipping, projections, and averages that are swapped in and out move them less.
- undone: a step moves the parameters back by what an adoption before it had moved them, or by half of it, and is
  otherwise an ordinary one. The optimizer keeps copies of the parameters (float32 masters: at the first step) or
  averages of them (some steps later). A gradient may lead back as well, but not so (`Reversal`).
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
JUDGED_VALUES = 16  # ... and so many values at least: what a few do is chance
WATCHED = 16  # steps after an adoption
LATER_STEPS = 3.0  # a later one than the first is looked at when it is larger than so many usual steps
REST, FIRST_REST = 0.4, 0.25  # of the adoption, that a reversal differs from it at most; before a step was seen
EPSILON = float(np.finfo(np.float32).eps)
VOTES, AGAINST = 4, 3  # when of so many adoptions so many are undone, it is no chance


@dataclass(frozen=True, slots=True)
class Reversal:
    """How a step that takes an adoption back differs from one whose gradient leads there: both of these hold.

    part: of the adoption, more and less than which it takes back.
    evidence: it goes so many times as far back as any remembered step went along the adoption.
    rest: apart from the adoption (or the part, in later steps) it is at most so many times the largest remembered step.

    Measured where a step takes back such a part of an adoption that is judged (256 values are seen, seeds from 0 on):

                 first step: evidence, rest    later step: evidence, rest
        copies   at least 18, at most 2.5      at least 5.9, at most 1.1
        merging  2.0 to 13, at most 1.0        at most 3.6, at most 0.7
        honest   at most 1.4, at most 1.2      at most 3.5 where the rest is at most 1.8; else up to 16, at least 2.0

    Copies: 54 runs of 60 steps, adoptions of 2, 10 and 50 %, masters under SGD and AdamW, Lookahead, float32 and
    bfloat16. Merging: pairs, both with copies, that merge only with each other; 152 of 158 reversals by masters are
    evident, those of Lookahead are too small beside its own steps. Honest: pairs that merge; 300 runs of 75 steps of
    SGD (one parameter, convolutions, bfloat16, float32, tied weights), and 40 of AdamW in which the core came back
    from a backup. AdamW's step is then 100 times its usual, and so is the rest: 0.2 to 10 of the adoption, that of
    copies at most 0.34. Where all of a model's steps go along one direction there is no rest: evidence tells.
    """

    part: tuple[float, float]
    evidence: float
    rest: float

    def looks_so(self, moved: F32, given: _Given) -> bool:
        """Whether a step takes back such a part of what was given."""
        return self.part[0] < -float(moved @ given.change) / given.size**2 < self.part[1]


AT_ONCE = Reversal((0.7, 1.3), 3.0, 3.0)  # masters; clipped weights may take half of it back
LATER = Reversal((0.4, 1.3), 4.0, 1.5)  # slow weights


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
    """An adoption that is watched. change: 0 where it touched nothing. places, values: bool, which it touched.

    size: its norm. usual: that of a step there. rounded: so much of it may be rounding. judged: it is large enough.
    age: steps since then.
    """

    change: F32
    places: NDArray[np.bool_]
    values: NDArray[np.bool_]
    size: float
    usual: float
    rounded: float
    judged: bool
    age: int = 0


class Moves:
    """Looks at what happened in its order.

    edges: int64, where each place begins in a row. fragments: int64, of each place. rounding: relative, of its type.
    """

    def __init__(self, edges: NDArray[np.int64], fragments: NDArray[np.int64], rounding: F32) -> None:
        self._edges = edges
        self._fragments = fragments
        self._rounding = rounding
        self._sizes = np.zeros((HISTORY, len(edges)), np.float32)
        self._known: deque[F32] = deque(maxlen=HISTORY)  # the steps themselves
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
            verdict, step = self._beside(rows, each) if beside[number] else (Verdict.FINE, moved[number])
            if verdict is Verdict.FINE and self._watched:
                verdict, step = self._undone(moved[number], whole[number], step, later=large[number])
            if verdict < Verdict.UNDONE and not each.leaving:
                self._count(step)
            worst = max(worst, verdict)
            number = number + 1
            self._slack = None
        return worst

    def _beside(self, rows: F32, each: Cycle) -> tuple[Verdict, F32]:
        """Whether the parameters were written beside the optimizer's step; and that step."""
        start, before, after, end = rows[[each.start, each.before, each.after, each.end]]
        early, own, late = self._norms(np.stack((before - start, after - before, end - after)))
        size = np.where(own > 0, own, late)  # late: what steps, and then writes by other means
        usual = self._usual if self._steps else size
        written = self._written(early, start, usual)
        if self._steps >= (1 if each.leaving else RELIABLE):
            written |= self._written(late, end, usual)
        step = np.where(self._of(own > 0, start), after - before, end - after)
        return Verdict.WRITTEN if written else Verdict.FINE, step

    def _norms(self, values: F32) -> F32:
        """Of each place. values: (..., values)."""
        return np.sqrt(np.add.reduceat(values * values, self._edges, axis=-1))

    def _learn(self) -> None:
        if self._steps:
            self._usual = np.median(self._sizes[: self._steps], axis=0)

    def _count(self, step: F32) -> None:
        if step.any():
            self._known.append(step)
            self._sizes[self._steps % HISTORY] = self._norms(step)
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
        change = (after - before) * self._of(places, after)
        fresh = [given for given in self._watched if given.age == 0]
        self._watched = [given for given in self._watched if given.age > 0]
        # Adoptions without a step in between are taken back together, those that an optimizer's copies have missed.
        for given in fresh:
            self._watch(given.change + change, given.places | places, after)
        self._slack = self._norms(change)
        self._watch(change, places, after)

    def _watch(self, change: F32, places: NDArray[np.bool_], after: F32) -> None:
        values = self._of(places, after)
        size = _norm(change)
        usual = _norm(self._usual[places])
        whole = _norm(after[values])
        rounded = ROUNDINGS * EPSILON * whole
        least = JUDGED_STEPS * (usual + rounded) if self._steps else JUDGED_PART * whole
        judged = size > least and bool(np.count_nonzero(change) >= JUDGED_VALUES)
        if size:
            self._watched.append(_Given(change, places, values, size, usual, rounded, judged))

    def _of(self, places: NDArray[np.bool_], row: F32) -> NDArray[np.bool_]:
        """The values of these places in a row."""
        return np.repeat(places, np.diff(self._edges, append=len(row)))

    def _undone(self, moved: F32, whole: F32, step: F32, *, later: bool) -> tuple[Verdict, F32]:
        """Whether this step took an adoption back; and the optimizer's part of it, without what it may have taken back.

        moved, whole: what it moved, and its size in each place. step: the optimizer's part of it. later: it may be
        large enough to take back what is older than a step.
        """
        other = step  # of a reversal that is too small to be told only the rest counts: else it would look usual
        for given in list(self._watched):
            if given.age == 0 and not whole[given.places].any():  # as when a scaler skips it
                continue
            given.age += 1
            undone = False
            if given.judged and (given.age == 1 or (later and _norm(whole[given.places]) > LATER_STEPS * given.usual)):
                undone = self._takes_back(moved, given)
            if undone or given.age == WATCHED or not given.judged:
                self._watched.remove(given)
            if undone or given.age == WATCHED:
                self._votes.append(undone)
            if undone:
                self._watched.clear()
                return (Verdict.COPIES if sum(self._votes) >= AGAINST else Verdict.UNDONE), step
            if given.age == 1 and AT_ONCE.looks_so(moved, given) and _norm(step + given.change) < _norm(other):
                other = step + given.change
        return Verdict.FINE, other

    def _takes_back(self, moved: F32, given: _Given) -> bool:
        """Whether a step is the reversal of an adoption and an ordinary step."""
        kind, unit = AT_ONCE if given.age == 1 else LATER, given.change / given.size
        if not kind.looks_so(moved, given):
            return False
        back = -float(moved @ unit)
        rest = _norm((moved + (given.size if given.age == 1 else back) * unit)[given.values])
        if not self._known or rest > REST * given.size:
            return not self._known and rest <= FIRST_REST * given.size
        known = np.stack(self._known)
        along = float(np.abs(known @ unit).max()) + given.rounded
        largest = float(np.sqrt(np.sum(known[:, given.values] ** 2, axis=1)).max()) + given.rounded
        return back > kind.evidence * along and rest <= kind.rest * largest


def _norm(values: F32) -> float:
    return float(np.sqrt(np.sum(values * values)))
