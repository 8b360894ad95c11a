"""The disturbances of the deployment: four chapters of equal length with different disturbances.

A restarted process begins at zero, and a cut ends calls that leaked over the connection. A leak is therefore visible
only in processes and connections that outlive its cause, so each chapter leaves some parts alone:

| chapter | disturbed | left alone | detects leaks |
|---|---|---|---|
| 1 | everything | nothing | only of calls, in the first minutes |
| 2 | the WAN is cut, the core restarted | front, links of learners | per rejoin behind a running front |
| 3 | links of b, c and d are cut | core, front, WAN | per learner that joins and leaves |
| 4 | the front is restarted, the WAN cut | core | in a core whose callers vanish |

Learners c and d are restarted in all chapters, and a and b in none.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tests.soak.deployment import RESTARTED, Deployment

SIGNALS = (signal.SIGTERM, signal.SIGKILL)
LINKS = ("the link of b", "the link of c", "the link of d", "the links of b, c, d")
WAN = "the WAN"


@dataclass(frozen=True, slots=True)
class Chapter:
    """One chapter. cuts: connections to reset, once per mention. restarts: processes to end, once with each signal."""

    cuts: Sequence[str]
    restarts: Sequence[str]


CHAPTERS = (
    Chapter((WAN, WAN, *LINKS), ("core", "front")),
    Chapter((WAN,) * 5, ("core",)),
    Chapter(LINKS * 2, ()),
    Chapter((WAN,) * 3 + LINKS[:2], ("front",)),
)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One disturbance.

    target: a process, the WAN, or links. number: a signal, or None for a cut. silent: no side hears of the cut.
    """

    target: str
    number: signal.Signals | None = None
    silent: bool = False

    def __str__(self) -> str:
        if self.number is not None:
            return f"{self.number.name} to {self.target}"
        return f"{'silence on' if self.silent else 'cut of'} {self.target}"

    def happen(self, deployment: Deployment) -> None:
        """Makes the disturbance. A restarted core or front serves again afterwards."""
        if self.number is not None:
            deployment.restart(self.target, self.number)
        elif self.target == WAN:
            self._cut_one(deployment, "")
        else:
            for name in self.target.partition(" of ")[2].split(", "):
                self._cut_one(deployment, name)

    def _cut_one(self, deployment: Deployment, learner: str) -> None:
        relay = deployment.links[learner] if learner else deployment.wan
        if self.silent:
            relay.stall()
        else:
            relay.reset()


class Deck:
    """All disturbances of a chapter, repeatedly in random order, with one silence per chapter."""

    def __init__(self, seed: int, *, silences: bool) -> None:
        self._rng, self._silences = random.Random(seed), silences
        self._chapter, self._cards = -1, list[Disturbance]()

    def draw(self, number: int) -> Disturbance:
        """Draws the next disturbance of a chapter."""
        if number != self._chapter or not self._cards:
            self._cards = self._shuffled(number)
        self._chapter = number
        return self._cards.pop()

    def _shuffled(self, number: int) -> list[Disturbance]:
        chapter = CHAPTERS[number]
        cards = [Disturbance(target) for target in chapter.cuts]
        cards += [Disturbance(name, each) for name in chapter.restarts for each in SIGNALS]
        cards += [Disturbance(name, each) for name, each in zip(RESTARTED, self._rng.sample(SIGNALS, 2), strict=True)]
        if self._silences and number != self._chapter:
            cards.append(Disturbance(chapter.cuts[0], silent=True))
        self._rng.shuffle(cards)
        return cards
