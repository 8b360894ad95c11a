"""PURE: is the size of a contribution plausible beside what came for its fragment before?

A pseudo-gradient grows with the inner steps behind it, between their square root (steps that wander) and their number
(steps that agree). Beside the running median of the last contributions, from whomever, one of `steps` inner steps may
be expected to have the norm

    median norm x r        for r = steps / median steps >= 1
    median norm x sqrt(r)  for r < 1

Beyond `norm_limit` times that it is refused; beyond `clip_norm` times that it is scaled down to it. Between the two is
what is unusual and honest: an island that joins with an optimizer without history makes steps many times those of the
others. Refused ones move the median too: one island's garbage cannot shift it, and when all islands change, it follows
instead of refusing for ever. Nothing is judged before the window is full: while a learning rate warms up, norms grow
tenfold within a few rounds.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """scale: what a contribution is multiplied with when it is merged. refusal: why it is not taken; empty: it is."""

    scale: float = 1.0
    refusal: str = ""


class Guard:
    """The running medians of one run, over `window` contributions to each fragment.

    norm_limit, clip_norm: ratios; 0 switches either off.
    """

    def __init__(self, fragments: int, window: int, norm_limit: float, clip_norm: float) -> None:
        self.window, self._norm_limit, self._clip_norm = window, norm_limit, clip_norm
        self._norms: list[deque[float]] = [deque(maxlen=window) for _ in range(fragments)]
        self._steps: list[deque[int]] = [deque(maxlen=window) for _ in range(fragments)]

    def note(self, fragment: int, norm: float, steps: int) -> None:
        """One more contribution came, taken or refused."""
        self._norms[fragment].append(norm)
        self._steps[fragment].append(steps)

    def judge(self, fragment: int, norm: float, steps: int) -> Verdict:
        """norm: over the whole fragment. Changes nothing."""
        if len(self._norms[fragment]) < self.window:
            return Verdict()
        usual = statistics.median_low(self._norms[fragment])
        if usual <= 0.0:
            return Verdict()
        ratio = steps / statistics.median_low(self._steps[fragment])
        expected = usual * (ratio if ratio >= 1 else math.sqrt(ratio))
        times = norm / expected
        if self._norm_limit and times > self._norm_limit:
            return Verdict(
                refusal=f"its norm {norm:.3g} is {times:.3g} times what {steps} steps usually give (limit "
                f"{self._norm_limit:g}): this island's training has gone astray, it goes on from the others' parameters"
            )
        if self._clip_norm and times > self._clip_norm:
            return Verdict(scale=self._clip_norm / times)
        return Verdict()
