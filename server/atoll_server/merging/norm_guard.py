"""PURE: is the size of a contribution plausible beside what came for its fragment before?

A pseudo-gradient grows with the inner steps behind it, between their square root (steps that wander) and their number
(steps that agree). Beside the running median of what was accepted, one of `steps` inner steps may be expected to have
the norm

    median norm x min(r, LONGEST)    for r = steps / median steps >= 1
    median norm x sqrt(r)            for r < 1

Beyond `norm_limit` times that it is refused; beyond `clip_norm` times that it is scaled down to it. Between the two is
what is unusual and honest: an island that joins with an optimizer without history makes steps many times those of the
others. Nothing is judged before as many as fill the window were accepted: while a learning rate warms up, norms grow
tenfold within a few rounds.

Learners have equal shares of the window, however much each sends, and what was refused is not in it: a minority cannot
move the median. When norms really change, everybody's do: once more than half of the learners that are here were
refused in AGREED rounds in a row, what they sent is what is usual from there on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

LONGEST = 10.0  # times the usual steps: more of them excuse no larger norm
AGREED = 4  # refusals in a row; a learner has at most one in a round (`Uploads.offer`)

Size = tuple[float, int]  # norm over the whole fragment, inner steps


@dataclass(frozen=True, slots=True)
class Verdict:
    """scale: what a contribution is multiplied with when it is merged. refusal: why it is not taken; empty: it is."""

    scale: float = 1.0
    refusal: str = ""


@dataclass(slots=True)
class _Usual:
    """Of one fragment. taken, refused: each learner's latest sizes; who sent last is last. count: of all taken."""

    taken: dict[str, deque[Size]] = field(default_factory=dict)
    refused: dict[str, deque[Size]] = field(default_factory=dict)  # since the learner's last that was taken
    count: int = 0

    def sizes(self, window: int) -> list[Size]:
        """The window: equal shares of it."""
        share = max(1, window // max(1, len(self.taken)))
        return [size for latest in self.taken.values() for size in list(latest)[-share:]]

    def changed_for_all(self, learner: str, present: Set[str]) -> bool:
        """Whether most of those who are here were refused often enough, this learner among them."""
        here = (self.taken.keys() | self.refused.keys()) & (present | {learner})
        agreed = {name for name in here if len(self.refused.get(name, ())) >= AGREED}
        return learner in agreed and 2 * len(agreed) > len(here)


class Guard:
    """What is usual in one run, over `window` contributions to each fragment.

    norm_limit, clip_norm: ratios; 0 switches either off.
    """

    def __init__(self, fragments: int, window: int, norm_limit: float, clip_norm: float) -> None:
        self.window = window
        self._norm_limit = norm_limit
        self._clip_norm = clip_norm
        self._usual = [_Usual() for _ in range(fragments)]

    def enter(self, fragment: int, learner: str, norm: float, steps: int, present: Set[str]) -> Verdict:
        """Judges a contribution and takes note of it. present: learners that may be expected to contribute."""
        usual, verdict = self._usual[fragment], self.judge(fragment, norm, steps)
        if verdict.refusal and usual.changed_for_all(learner, present):
            usual.taken = usual.refused
            usual.refused, verdict = {}, Verdict()
        if verdict.refusal:
            usual.refused.setdefault(learner, deque(maxlen=AGREED)).append((norm, steps))
            _keep(usual.refused, self.window)
        else:
            self.note(fragment, learner, norm, steps)
        return verdict

    def note(self, fragment: int, learner: str, norm: float, steps: int) -> None:
        """One more was accepted."""
        usual = self._usual[fragment]
        usual.refused.pop(learner, None)
        latest = usual.taken.pop(learner, ())
        usual.taken[learner] = deque([*latest, (norm, steps)], maxlen=self.window)
        _keep(usual.taken, self.window)
        usual.count += 1

    def judge(self, fragment: int, norm: float, steps: int) -> Verdict:
        """norm: over the whole fragment. Changes nothing."""
        usual = self._usual[fragment]
        if usual.count < self.window:
            return Verdict()
        sizes = usual.sizes(self.window)
        usual_norm = statistics.median_low([size for size, _ in sizes])
        if usual_norm <= 0.0:
            return Verdict()
        ratio = steps / statistics.median_low([behind for _, behind in sizes])
        expected = usual_norm * (min(ratio, LONGEST) if ratio >= 1 else math.sqrt(ratio))
        times = norm / expected
        if self._norm_limit and times > self._norm_limit:
            return Verdict(
                refusal=f"its norm {norm:.3g} is {times:.3g} times what {steps} steps usually give (limit "
                f"{self._norm_limit:g}): this island's training has gone astray, it goes on from the others' parameters"
            )
        if self._clip_norm and times > self._clip_norm:
            return Verdict(scale=self._clip_norm / times)
        return Verdict()


def _keep(latest: dict[str, deque[Size]], learners: int) -> None:
    """At most so many learners': who sent longest ago goes first."""
    while len(latest) > learners:
        del latest[next(iter(latest))]
