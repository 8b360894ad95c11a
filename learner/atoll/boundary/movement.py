"""PURE: judges what moved the parameters: the optimizer, an adoption, or something else. No torch.

A place is a short run of values in the parameters. A row holds the values of all places. The watch reads rows at the
end of a step boundary, before and after the optimizer's step, and at the beginning of the next boundary. Rows show two
problems:

- written: outside the optimizer's step and adoptions, most places moved by much more than the optimizer's usual step.
  For example, the program loaded weights. Clipping, projections and swapped averages move the places less.
- undone: a step reverses all or half of an earlier adoption and is otherwise an ordinary step. The cause is that the
  optimizer keeps copies of the parameters: float32 master weights (undone at the first step) or averages (undone some
  steps later).
  A gradient may also reverse an adoption. `Reversal` tells these two causes apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from atoll_wire.codec.block_kernels import F32
from numpy.typing import NDArray

HISTORY = 32  # number of steps whose sizes are remembered
RELIABLE = 8  # writes after a step are judged only after this many steps, because the first projection may be large
WRITTEN_STEPS = 8.0  # a place that moved by more than this many usual steps was written
ROUNDINGS = 4.0  # swapping values out and back in may change them by this many relative roundings of their type
JUDGED_STEPS = 4.0  # an adoption is judged if it moved by more than this many usual steps,
JUDGED_PART = 0.01  # or, before the first step, by more than this fraction of the values' norm,
JUDGED_VALUES = 16  # and if it moved at least this many values, because a few may move by chance
WATCHED = 16  # number of steps after an adoption that are examined
LATER_STEPS = 3.0  # steps after the first are examined if they are larger than this many usual steps
# Largest difference between a reversal and the adoption, relative to the adoption. FIRST_REST: before the first step.
REST, FIRST_REST = 0.4, 0.25
EPSILON = float(np.finfo(np.float32).eps)
VOTES, AGAINST = 4, 3  # AGAINST undone adoptions among the last VOTES adoptions cannot be chance


@dataclass(frozen=True, slots=True)
class Reversal:
    """Criteria for a step in which copies, and not a gradient, reverse an adoption. All must hold.

    part: smallest and largest fraction of the adoption that the step reverses.
    evidence: along the adoption, the step moves back at least this many times as far as any remembered step moved.
    rest: the rest of the step is at most this many times the largest remembered step. The rest is the step plus the
    adoption or, in later steps, the step plus the reversed fraction of the adoption.

    The table was measured with steps that reverse part[0] to part[1] of a judged adoption (256 values, seeds from 0):

                 first step: evidence, rest    later step: evidence, rest
        copies   at least 18, at most 2.5      at least 5.9, at most 1.1
        merging  2.0 to 13, at most 1.0        at most 3.6, at most 0.7
        honest   at most 1.4, at most 1.2      at most 3.5 where the rest is at most 1.8; else up to 16, at least 2.0

    Copies: 54 runs of 60 steps, with adoptions of 2, 10 and 50 %, masters under SGD and AdamW, Lookahead, float32 and
    bfloat16. Merging: pairs of learners with copies that merge only with each other. 152 of 158 reversals by masters
    meet the criteria. Lookahead's reversals are too small relative to its own steps. Honest: pairs of learners without
    copies. 300 runs take 75 steps of SGD (one parameter, convolutions, bfloat16, float32, tied weights). In 40 runs
    with AdamW, the core is restored from a backup. AdamW's step is then 100 times its usual step, and the rest is 0.2
    to 10 times the adoption, vs. at most 0.34 with copies. If all steps of a model have one direction, there is no
    rest, and evidence decides.
    """

    part: tuple[float, float]
    evidence: float
    rest: float

    def looks_so(self, moved: F32, given: _Given) -> bool:
        """Returns whether a step reverses part[0] to part[1] of an adoption. moved: the step, float32 (values,)."""
        return self.part[0] < -float(moved @ given.change) / given.size**2 < self.part[1]


FIRST = Reversal((0.7, 1.3), 3.0, 3.0)  # float32 master weights; above half, because weight clipping may reverse half
LATER = Reversal((0.4, 1.3), 4.0, 1.5)  # slow weights


class Movement(IntEnum):
    """A verdict on a movement, from best to worst. UNDONE: a step undid an adoption. COPIES: several steps undid
    adoptions."""

    FINE = 0
    WRITTEN = 1
    UNDONE = 2
    COPIES = 3


@dataclass(frozen=True, slots=True)
class BoundaryRows:
    """The interval from the end of a boundary to the beginning of the next, as indices of rows.

    before, after: rows around the optimizer's steps. If no step was seen, the whole interval is treated as one step.
    leaving: whether the interval ends because the learner leaves, and not because it called `step`.
    """

    start: int
    before: int
    after: int
    end: int
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Adoption:
    """An adoption of fragments. before, after: indices of rows. reset: whether it resets the parameters to the run's
    values after a bad verdict."""

    before: int
    after: int
    fragments: tuple[int, ...]
    reset: bool = False


@dataclass(slots=True, eq=False)
class _Given:
    """A watched adoption. change: float32 (values,), 0 in other fragments.

    places, values: bool, True in adopted fragments. size: norm of the change. usual: norm of a usual step in these
    places. rounded: norm that rounding may cause. judged: whether the change is large enough to judge. part: whether
    it is a part of another watched change. age: steps since the adoption.
    """

    change: F32
    places: NDArray[np.bool_]
    values: NDArray[np.bool_]
    size: float
    usual: float
    rounded: float
    judged: bool
    part: bool
    age: int = 0


class MovementDetector:
    """Judges movements in the order in which they happened.

    edges: int64, start of each place in a row. fragments: int64, fragment of each place. rounding: float32, relative
    rounding of each place's type.
    """

    def __init__(self, edges: NDArray[np.int64], fragments: NDArray[np.int64], rounding: F32) -> None:
        self._edges = edges
        self._width = 0  # number of values in a row
        self._lengths = np.zeros(0, np.int64)  # number of values of each place
        self._fragments = fragments
        self._rounding = rounding
        self._sizes = np.zeros((HISTORY, len(edges)), np.float32)
        self._known: deque[F32] = deque(maxlen=HISTORY)  # the remembered steps
        self._steps = 0
        self._usual = np.zeros(len(edges), np.float32)
        self._watched: list[_Given] = []
        self._slack: F32 | None = None  # how far a projection may move each place back after the last boundary
        self._good: F32 | None = None  # from a bad verdict until the reset: the row before the bad movement
        self._votes: deque[bool] = deque(maxlen=VOTES)

    def look(self, rows: F32, happened: Sequence[BoundaryRows | Adoption]) -> Movement:
        """Returns the worst verdict on new movements of the parameters.

        rows: float32 (movements, sampled values). happened: the movements, oldest first.
        """
        with np.errstate(all="ignore"):  # values that are not finite raise an error when they are encoded
            return self._look(rows, happened)

    def _look(self, rows: F32, happened: Sequence[BoundaryRows | Adoption]) -> Movement:
        self._learn()
        if rows.shape[1] != self._width:
            self._width = rows.shape[1]
            self._lengths = np.diff(self._edges, append=self._width)
        cycles = [each for each in happened if isinstance(each, BoundaryRows)]
        columns = np.array([(c.start, c.before, c.after, c.end) for c in cycles], np.int64).reshape(-1, 4).T
        moved = rows[columns[3]] - rows[columns[0]]
        whole = self._norms(moved)
        # Most intervals need no closer look. One numpy call for all of them is as fast as a call for one.
        unlike = (rows[columns[0]] != rows[columns[1]]) | (rows[columns[2]] != rows[columns[3]])
        beside: list[bool] = np.logical_or.reduce(unlike, axis=1).tolist()
        large: list[bool] = np.logical_or.reduce(whole > LATER_STEPS * self._usual, axis=1).tolist()
        worst, number = Movement.FINE, 0
        for each in happened:
            if isinstance(each, Adoption):
                self._adopted(rows[each.before], rows[each.after], each)
                continue
            verdict, step = self._beside(rows, each) if beside[number] else (Movement.FINE, moved[number])
            if verdict is Movement.FINE and self._watched:
                self._combine(whole[number], rows[each.start])
                verdict, step = self._undone(moved[number], whole[number], step, later=large[number])
            if verdict < Movement.UNDONE and not each.leaving:
                self._count(step)
            if verdict is not Movement.FINE and self._good is None:
                self._good = rows[each.start].copy()
            worst = max(worst, verdict)
            number = number + 1
            self._slack = None
        return worst

    def _beside(self, rows: F32, each: BoundaryRows) -> tuple[Movement, F32]:
        """Returns the verdict on writes outside the optimizer's step, and the optimizer's step, float32 (values,)."""
        start, before, after, end = rows[[each.start, each.before, each.after, each.end]]
        early, own, late = self._norms(np.stack((before - start, after - before, end - after)))
        size = np.where(own > 0, own, late)  # some optimizers' results are written after their step
        usual = self._usual if self._steps else size
        written = self._written(early, start, usual)
        if self._steps >= (1 if each.leaving else RELIABLE):
            written |= self._written(late, end, usual)
        step = np.where(self._of(own > 0), after - before, end - after)
        return Movement.WRITTEN if written else Movement.FINE, step

    def _norms(self, values: F32) -> F32:
        """Returns the norm of each place, (..., places). values: (..., values)."""
        return np.sqrt(np.add.reduceat(values * values, self._edges, axis=-1))

    def _learn(self) -> None:
        if known := min(self._steps, HISTORY):  # faster than np.median, with the same result
            ordered = np.sort(self._sizes[:known], axis=0)
            self._usual = (ordered[(known - 1) // 2] + ordered[known // 2]) * np.float32(0.5)

    def _count(self, step: F32) -> None:
        if step.any():
            self._known.append(step)
            self._sizes[self._steps % HISTORY] = self._norms(step)
            self._steps += 1
            if self._steps <= RELIABLE:
                self._learn()

    def _written(self, moved: F32, values: F32, usual: F32) -> bool:
        """Returns whether most places moved by more than is allowed. moved, usual: norms per place. values: the row."""
        if not moved.any():
            return False
        allowed = WRITTEN_STEPS * usual + ROUNDINGS * self._rounding * self._norms(values)
        if self._slack is not None:  # a projection moves back at most as far as an adoption moved
            allowed = allowed + self._slack
        alive = (moved > 0) | (usual > 0)
        return bool(2 * np.count_nonzero(moved > allowed) > np.count_nonzero(alive))

    def _adopted(self, before: F32, after: F32, each: Adoption) -> None:
        places = (self._fragments[:, None] == each.fragments).any(axis=1)
        change = (after - before) * self._of(places)
        self._slack = self._norms(change)
        if each.reset and self._good is not None:  # a reset moves the values far, but a later projection does not
            self._slack, self._good = self._norms(after - self._good), None
        self._watch(change, places, after)

    def _combine(self, whole: F32, start: F32) -> None:
        """Watches also the sum of the adoptions since the last step, because an optimizer with copies reverses it.

        whole: norm of the next step per place. start: the row before that step.
        """
        fresh = [given for given in self._watched if given.age == 0 and not given.part and whole[given.places].any()]
        if len(fresh) > 1:
            places = np.any([given.places for given in fresh], axis=0)
            self._watch(np.sum([given.change for given in fresh], axis=0, dtype=np.float32), places, start)

    def _watch(self, change: F32, places: NDArray[np.bool_], after: F32, *, part: bool = False) -> None:
        """Watches a change. part: whether the change is a part of another watched change."""
        values = self._of(places)
        size = _norm(change)
        usual = _norm(self._usual[places])
        whole = _norm(after[values])
        rounded = ROUNDINGS * EPSILON * whole
        least = JUDGED_STEPS * (usual + rounded) if self._steps else JUDGED_PART * whole
        judged = size > least and bool(np.count_nonzero(change) >= JUDGED_VALUES)
        if size and (judged or not part):
            self._watched.append(_Given(change, places, values, size, usual, rounded, judged, part))
        if not judged and not part:  # one fragment may have moved far and the others little
            adopted = sorted({*self._fragments[places].tolist()})
            for fragment in adopted if len(adopted) > 1 else ():
                own = self._fragments == fragment
                self._watch(np.where(self._of(own), change, np.float32(0.0)), own, after, part=True)

    def _of(self, places: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns a mask of a row's values at these places, bool (values,)."""
        return np.repeat(places, self._lengths)

    def _undone(self, moved: F32, whole: F32, step: F32, *, later: bool) -> tuple[Movement, F32]:
        """Returns the verdict on a reversal, and the optimizer's step without any reversal.

        moved, whole: the change over the interval and its norm per place. step: the optimizer's part of the change.
        later: whether the change is large enough to reverse an adoption that is older than one step.
        """
        other = step  # remember only the rest of an undetected small reversal, so that reversals do not become usual
        for given in list(self._watched):
            if given.age == 0 and not whole[given.places].any():  # for example, a gradient scaler skipped the step
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
                return (Movement.COPIES if sum(self._votes) >= AGAINST else Movement.UNDONE), step
            if given.age == 1 and FIRST.looks_so(moved, given) and _norm(step + given.change) < _norm(other):
                other = step + given.change
        return Movement.FINE, other

    def _takes_back(self, moved: F32, given: _Given) -> bool:
        """Returns whether a step consists of an adoption's reversal and an ordinary step."""
        kind, unit = FIRST if given.age == 1 else LATER, given.change / given.size
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
    return math.sqrt(np.add.reduce(values * values))
