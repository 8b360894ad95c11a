"""PURE: how much of what a learner says that it trained is counted. Nobody can see it train; the core has a clock.

- Reported steps and tokens count as far as the time since the last of them allows at FASTER times the rate of most of
  the others. What is more is counted later, when time allows it. What a learner counted before excuses nothing.
- Tokens are held back while there are others, and none of them has trained yet: they count as soon as there is a rate
  to compare them with. A learner that is alone is the run: all of its tokens count.
- A contribution's tokens count as far as they were counted of its learner and not given to this fragment before, and
  what the time since its last report allows at its own rate, or that of the others while it has none: a contribution
  may overtake the report.
- Tokens of a step, which a weight grows with, are at most MIXED times those of the others' steps, or as many as a
  learner takes at its step rate that trains FASTER times the others' tokens per second.
- In a merge a learner weighs at most FASTER times what most of the others do.

Honest learners are below all of these; a liar has the influence of an honest learner on much better hardware.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

FASTER = 10.0  # times the others: hardware differs so much
MOST_STEPS_S, MOST_TOKENS_S = 2e3, 1e9  # of a learner that is alone: no hardware does more
SPARE_S = 10.0  # of time without steps that may be used later: reports come at any moment, and late
OVERTAKEN = 2.0  # times its own rate, since the last report: what a contribution may be ahead of it
OVERTAKEN_STEPS, OVERTAKEN_S = 4.0, 1.0  # and so many steps, and those of so long: the last report was late itself
MIXED = 4.0  # times the usual tokens of a step, in a contribution of few of them


@dataclass(frozen=True, slots=True)
class Most:
    """Per second: what counts of a learner's reports."""

    steps_s: float = MOST_STEPS_S
    tokens_s: float = MOST_TOKENS_S


HELD = Most(MOST_STEPS_S, 0.0)  # steps count, for rounds follow them; tokens wait for a comparison


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a learner trains: inner steps per second by the core's clock, tokens of each as it reports them."""

    steps_s: float
    batch: float

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.steps_s * self.batch


class Rates:
    """Those of all learners at one moment. starting: learners that have joined and have no rate yet."""

    def __init__(self, rates: Mapping[str, Rate], starting: Set[str] = frozenset()) -> None:
        self._rates = rates
        self._starting = starting
        self.known = len(rates)
        self._steps = sorted(rate.steps_s for rate in rates.values())
        self._batches = sorted(rate.batch for rate in rates.values())
        self._tokens = sorted(rate.tokens_s for rate in rates.values())

    def of(self, learner: str) -> Rate | None:
        """Its own."""
        return self._rates.get(learner)

    def usual(self, learner: str) -> Rate | None:
        """That of most of the others; None when no other has one."""
        own = self._rates.get(learner)
        steps_s = _middle(self._steps, own.steps_s if own is not None else None)
        batch = _middle(self._batches, own.batch if own is not None else None)
        return None if steps_s is None or batch is None else Rate(steps_s, batch)

    def most(self, learner: str) -> Most:
        """What may be counted of a learner's reports."""
        own = self._rates.get(learner)
        steps_s = _middle(self._steps, own.steps_s if own is not None else None)
        tokens_s = _middle(self._tokens, own.tokens_s if own is not None else None)
        if steps_s is None or tokens_s is None:
            return HELD if len(self._starting) > (learner in self._starting) else Most()
        return Most(min(MOST_STEPS_S, FASTER * steps_s), min(MOST_TOKENS_S, FASTER * tokens_s))


def _middle(values: Sequence[float], own: float | None) -> float | None:
    """The upper median of sorted values, one's own left out."""
    others = len(values) - (own is not None)
    if not others:
        return None
    middle = others // 2
    return values[middle + (own is not None and middle >= bisect_left(values, own))]


def parts_counted(weights: Mapping[str, float]) -> dict[str, float]:
    """By learner, the part of its weight in a merge that counts: at most FASTER times what most of the others weigh."""
    ordered, parts = sorted(weights.values()), {}
    for learner, weight in weights.items():
        usual = _middle(ordered, weight)
        parts[learner] = min(1.0, FASTER * usual / weight) if usual and weight else 1.0
    return parts


def counted(said: int, before: int, most_s: float, paid_until: float, now: float) -> tuple[int, float]:
    """What is counted of a sum that a learner says, and until when time is used up by that.

    before: what was counted so far. most_s: that may be counted each second. paid_until: as was returned last, or when
    it joined.
    """
    allowed = max(0, said - before)
    if most_s * (now - paid_until) < allowed:
        allowed = max(0, int(most_s * (now - paid_until)))
    if not allowed:
        return before, paid_until
    return before + allowed, max(paid_until + allowed / most_s, now - SPARE_S)


@dataclass(frozen=True, slots=True)
class Declared:
    """Tokens and inner steps of a contribution."""

    tokens: int
    steps: int


def weighed(
    said: Declared, reported: Declared, given: int, unheard_s: float, own: Rate | None, usual: Rate | None
) -> Declared:
    """What is counted of a contribution. reported: what is counted of its learner. given: tokens in its earlier
    contributions to this fragment. unheard_s: since the learner's last report of new steps.
    """
    rate = own or usual
    if rate is None:
        return said
    ahead = OVERTAKEN * unheard_s * rate.steps_s + OVERTAKEN_STEPS
    if own is not None:
        ahead += OVERTAKEN_S * own.steps_s
    steps = max(1, min(said.steps, int(reported.steps + ahead)))
    if usual is None:  # its tokens may be held back, and there is no work of others that it could outweigh
        return Declared(said.tokens, steps)
    batch = _most_of_a_step(own, usual)
    most = min(reported.tokens + ahead * min(rate.batch, batch) - given, batch * steps)
    return Declared(max(1, min(said.tokens, int(most))), steps)


def _most_of_a_step(own: Rate | None, usual: Rate) -> float:
    """Tokens, in a contribution. What a learner says of its own steps is no measure: only how fast they come is."""
    few_steps = FASTER * usual.tokens_s / own.steps_s if own is not None else 0.0
    return max(MIXED * usual.batch, few_steps)
