"""PURE: compares a contribution's norm with the accepted norms of earlier contributions to its fragment.

A pseudo-gradient's norm grows with its number of inner steps: between the square root (random walk) and linearly
(steps in the same direction). For a contribution of `steps` inner steps, the expected norm follows from the running
medians of accepted contributions:

    median norm x min(r, LONGEST)    for r = steps / median steps >= 1
    median norm x sqrt(r)            for r < 1

A contribution with a norm above `norm_limit` times the expected norm is refused. One with a norm above `clip_norm`
times the expected norm is scaled down to this limit. Unusual but honest contributions lie between the limits: a learner
that joins with a fresh optimizer makes much larger steps than the others. No contribution is judged before the window
is full, since norms grow tenfold within a few rounds of learning-rate warm-up.

All learners have equal shares of the window, which excludes refused norms, so a minority cannot move the median. A
genuine change of norms affects all learners. If more than half of the present learners were refused in AGREED rounds
in a row, their norms become the new reference.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

LONGEST = 10.0  # multiple of the median steps, beyond which more steps do not raise the expected norm
AGREED = 4  # refusals in a row; a learner has at most one per round (`Uploads.offer`)

Size = tuple[float, int]  # norm over the whole fragment, inner steps


@dataclass(frozen=True, slots=True)
class NormVerdict:
    """The verdict on a contribution. scale: its factor in the merge. refusal: the reason; empty if accepted."""

    scale: float = 1.0
    refusal: str = ""


@dataclass(slots=True)
class _Usual:
    """The sizes of recent contributions.

    taken, refused: the latest accepted and refused sizes by learner. The learner that sent last is last. count: number
    of accepted contributions.
    """

    taken: dict[str, deque[Size]] = field(default_factory=dict)
    refused: dict[str, deque[Size]] = field(default_factory=dict)  # since the learner's last accepted one
    count: int = 0

    def sizes(self, window: int) -> list[Size]:
        """Returns the sizes in the window, with an equal share from each learner."""
        share = max(1, window // max(1, len(self.taken)))
        return [size for latest in self.taken.values() for size in list(latest)[-share:]]

    def changed_for_all(self, learner: str, present: Set[str]) -> bool:
        """Returns whether this learner and more than half of all present ones were refused AGREED times in a row."""
        here = (self.taken.keys() | self.refused.keys()) & (present | {learner})
        agreed = {name for name in here if len(self.refused.get(name, ())) >= AGREED}
        return learner in agreed and 2 * len(agreed) > len(here)


class NormLimiter:
    """One fragment's reference norms, over its last `window` contributions.

    norm_limit, clip_norm: multiples of the expected norm; 0 disables the limit.
    """

    def __init__(self, window: int, norm_limit: float, clip_norm: float) -> None:
        self.window = window
        self._norm_limit = norm_limit
        self._clip_norm = clip_norm
        self._usual = _Usual()

    @property
    def judges(self) -> bool:
        """Whether the window is full, so that further contributions are judged."""
        return self._usual.count >= self.window

    def enter(self, learner: str, norm: float, steps: int, present: Set[str]) -> NormVerdict:
        """Judges a contribution, and records it. present: learners that are expected to contribute."""
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
        """Records an accepted contribution. norm: over the whole fragment; steps: its inner steps."""
        usual = self._usual
        usual.refused.pop(learner, None)
        latest = usual.taken.pop(learner, ())
        usual.taken[learner] = deque([*latest, (norm, steps)], maxlen=self.window)
        _keep(usual.taken, self.window)
        usual.count += 1

    def judge(self, norm: float, steps: int) -> NormVerdict:
        """Judges a contribution without recording it. norm: over the whole fragment."""
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
                refusal=f"its norm {norm:.3g} is {times:.3g} times the usual norm of {steps} steps (limit "
                f"{self._norm_limit:g}): the learner's training has drifted too far; "
                "the learner continues from the others' parameters"
            )
        if self._clip_norm and times > self._clip_norm:
            return NormVerdict(scale=self._clip_norm / times)
        return NormVerdict()


def _keep(latest: dict[str, deque[Size]], learners: int) -> None:
    """Keeps the sizes of at most `learners` learners. Drops the learners that sent longest ago."""
    while len(latest) > learners:
        del latest[next(iter(latest))]
