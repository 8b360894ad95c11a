"""What is done to the deployment, and when: four chapters of equal length, each with its own deck of disturbances.

A process that is started again begins at zero, and a cut ends whatever leaked over that connection. A leak shows only
in a process, and over connections, that outlive what causes it. So each chapter leaves something alone:

| chapter | disturbed | left alone | shows what leaks |
|---|---|---|---|
| 1 | everything | nothing | only calls are judged: the first minutes |
| 2 | the WAN is cut, the core restarted | front, links of learners | for each rejoin behind a living front |
| 3 | links of b, c and d are cut | core, front, WAN | for each learner that comes and goes |
| 4 | the front is restarted, the WAN cut | core | in a core whose callers vanish |

Learners c and d are restarted in all of them, a and b in none.
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
    """cuts: connections that are reset, as often as they are named; restarts: processes that end by each signal."""

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
    """One thing that goes wrong. target: a process, the WAN, or links; number: None is a cut; silent: of no word."""

    target: str
    number: signal.Signals | None = None
    silent: bool = False

    def __str__(self) -> str:
        if self.number is not None:
            return f"{self.number.name} to {self.target}"
        return f"{'silence on' if self.silent else 'cut of'} {self.target}"

    def happen(self, deployment: Deployment) -> None:
        """Does it; a restarted core or front serves again."""
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
    """Everything that happens in a chapter, in random order, again and again; a silence once per chapter."""

    def __init__(self, seed: int, *, silences: bool) -> None:
        self._rng, self._silences = random.Random(seed), silences
        self._chapter, self._cards = -1, list[Disturbance]()

    def draw(self, number: int) -> Disturbance:
        """The next one of a chapter."""
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
