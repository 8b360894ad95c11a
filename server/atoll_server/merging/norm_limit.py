"""PURE: compares a contribution's norm with the norms of accepted contributions to the same fragment.

The norm of a pseudo-gradient grows with its number of inner steps. The growth lies between a square root (random walk)
and a linear function (steps in the same direction). For a contribution of `steps` inner steps, the expected norm
follows from the medians of recently accepted contributions:

    median norm x min(r, LONGEST)    for r = steps / median steps >= 1
    median norm x sqrt(r)            for r < 1

The core refuses a contribution whose norm is above `norm_limit` times the expected norm. If the norm is only above
`clip_norm` times the expected norm, the core scales the contribution down to this limit. The norms of honest
contributions can lie between the two limits. For example, a learner that joins with a fresh optimizer takes much larger
steps than the others. The core judges no contribution before the window is full, since norms grow tenfold within a few
rounds of learning-rate warm-up.

All learners have equal shares of the window, and the window excludes refused norms. A minority of learners therefore
cannot move the median. A genuine change of norms affects all learners. If the core refuses contributions of more than
half of the present learners in AGREED consecutive rounds, the refused norms become the new reference.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

LONGEST = 10.0  # multiple of the median number of steps above which more steps do not raise the expected norm
AGREED = 4  # number of consecutive refusals; a learner has at most one refusal per round (`Uploads.offer`)

Size = tuple[float, int]  # norm of the whole fragment, inner steps


@dataclass(frozen=True, slots=True)
class NormVerdict:
    """The decision on a contribution.

    scale: its factor in the merge. refusal: reason for the refusal; empty if accepted.
    """

    scale: float = 1.0
    refusal: str = ""


@dataclass(slots=True)
class _Usual:
    """The sizes of recent contributions, by learner. The learner that contributed last comes last.

    taken: sizes of accepted contributions. refused: sizes of refused contributions. count: number of all accepted
    contributions.
    """

    taken: dict[str, deque[Size]] = field(default_factory=dict)
    refused: dict[str, deque[Size]] = field(default_factory=dict)  # since the learner's last accepted contribution
    count: int = 0

    def sizes(self, window: int) -> list[Size]:
        """Returns the latest accepted sizes, at most `window`, with equal shares for all learners."""
        share = max(1, window // max(1, len(self.taken)))
        return [size for latest in self.taken.values() for size in list(latest)[-share:]]

    def changed_for_all(self, learner: str, present: Set[str]) -> bool:
        """Returns whether this learner and over half of the present learners were refused AGREED times in a row."""
        here = (self.taken.keys() | self.refused.keys()) & (present | {learner})
        agreed = {name for name in here if len(self.refused.get(name, ())) >= AGREED}
        return learner in agreed and 2 * len(agreed) > len(here)


class NormLimiter:
    """Judges the norms of contributions to one fragment. window: number of accepted contributions in the medians.

    norm_limit, clip_norm: multiples of the expected norm; 0 disables the limit.
    """

    def __init__(self, window: int, norm_limit: float, clip_norm: float) -> None:
        self.window = window
        self._norm_limit = norm_limit
        self._clip_norm = clip_norm
        self._usual = _Usual()

    @property
    def judges(self) -> bool:
        """Whether the window is full. Until then, the core accepts all contributions."""
        return self._usual.count >= self.window

    def enter(self, learner: str, norm: float, steps: int, present: Set[str]) -> NormVerdict:
        """Judges a contribution and records its size and the decision.

        norm: norm of the whole fragment. steps: number of inner steps. present: learners from which the core expects
        contributions.
        """
        usual, verdict = self._usual, self.judge(norm, steps)
        if verdict.refusal and usual.changed_for_all(learner, present):
            usual.taken = usual.refused
            usual.refused, verdict = {}, NormVerdict()
        if verdict.refusal:
            usual.refused.setdefault(learner, deque(maxlen=AGREED)).append((norm, steps))
            _keep(usual.refused, self.window)
        else:
            self.note(learner, norm, steps)
        return verdict

    def note(self, learner: str, norm: float, steps: int) -> None:
        """Records the size of an accepted contribution.

        norm: norm of the whole fragment. steps: number of inner steps.
        """
        usual = self._usual
        usual.refused.pop(learner, None)
        latest = usual.taken.pop(learner, ())
        usual.taken[learner] = deque([*latest, (norm, steps)], maxlen=self.window)
        _keep(usual.taken, self.window)
        usual.count += 1

    def judge(self, norm: float, steps: int) -> NormVerdict:
        """Judges a contribution without recording its size.

        norm: norm of the whole fragment. steps: number of inner steps.
        """
        if not self.judges:
            return NormVerdict()
        sizes = self._usual.sizes(self.window)
        usual_norm = statistics.median_low([size for size, _ in sizes])
        if usual_norm <= 0.0:
            return NormVerdict()
        ratio = steps / statistics.median_low([behind for _, behind in sizes])
        expected = usual_norm * (min(ratio, LONGEST) if ratio >= 1 else math.sqrt(ratio))
        times = norm / expected
        if self._norm_limit and times > self._norm_limit:
            return NormVerdict(
                refusal=f"its norm {norm:.3g} is {times:.3g} times the usual norm of {steps} steps "
                f"(limit {self._norm_limit:g}): the learner drops this work; if this recurs, lower its learning rate"
            )
        if self._clip_norm and times > self._clip_norm:
            return NormVerdict(scale=self._clip_norm / times)
        return NormVerdict()


def _keep(latest: dict[str, deque[Size]], learners: int) -> None:
    """Removes the learners that contributed longest ago from `latest` until at most `learners` remain."""
    while len(latest) > learners:
        del latest[next(iter(latest))]
