"""PURE: how much of a learner's reported work counts. The core cannot observe training, but it can measure time.

- Reported steps and tokens count up to FASTER times the other learners' median rate, for the time since the last
  counted work. The excess counts later, as time passes. A learner's own earlier reports do not raise any limit.
- If there are other learners and none of them has trained yet, tokens are held back. They count as soon as another
  learner has a rate. If a learner is alone, all its tokens count.
- A contribution's tokens count if they were counted for its learner and were not in its earlier contributions to this
  fragment. A contribution may arrive before the report. Further tokens therefore count for the time since the last
  report. They count at the learner's own rate, or at the others' rate if the learner has none.
- A contribution's weight grows with its tokens per step, which count up to the larger of two limits. The first limit
  is MIXED times the others' tokens per step. At the second limit, the learner's step rate gives FASTER times the
  others' tokens per second.
- In a merge, a learner's weight is at most FASTER times the others' median weight.

Honest learners stay below all of these limits. A learner with false reports has at most the influence of an honest
learner on much better hardware.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

FASTER = 10.0  # factor by which a learner may be faster than the others
MAX_STEPS_S, MAX_TOKENS_S = 2e3, 1e9  # limits per second for a learner that is alone, which no hardware exceeds
SPARE_S = 10.0  # unused seconds that later reports may use, since reports arrive late and irregularly
OVERTAKEN = 2.0  # factor on the learner's own rate, up to which a contribution may be ahead of the last report
OVERTAKEN_STEPS, OVERTAKEN_S = (
    4.0,
    1.0,
)  # further steps and time by which it may be ahead, since that report was late
MIXED = 4.0  # factor on the usual tokens per step, for contributions with few steps


@dataclass(frozen=True, slots=True)
class MaxRates:
    """Limits on the reported steps and tokens that count per second."""

    steps_s: float = MAX_STEPS_S
    tokens_s: float = MAX_TOKENS_S


HELD = MaxRates(MAX_STEPS_S, 0.0)  # steps count, since rounds follow steps; tokens wait for another learner's rate


@dataclass(frozen=True, slots=True)
class Rate:
    """A learner's training rate. steps_s: inner steps per second (core's clock). batch: reported tokens per step."""

    steps_s: float
    batch: float

    @property
    def tokens_s(self) -> float:
        """Reported tokens per second, on the core's clock."""
        return self.steps_s * self.batch


class Rates:
    """All learners' rates at one moment. starting: learners that have joined, but have no rate yet."""

    def __init__(self, rates: Mapping[str, Rate], starting: Set[str] = frozenset()) -> None:
        self._rates = rates
        self._starting = starting
        self.known = len(rates)
        self._steps = sorted(rate.steps_s for rate in rates.values())
        self._batches = sorted(rate.batch for rate in rates.values())
        self._tokens = sorted(rate.tokens_s for rate in rates.values())

    def of(self, learner: str) -> Rate | None:
        """Returns the learner's own rate, or None if it has none yet."""
        return self._rates.get(learner)

    def usual(self, learner: str) -> Rate | None:
        """Returns the other learners' median rate, or None if none of them has a rate."""
        own = self._rates.get(learner)
        steps_s = _middle(self._steps, own.steps_s if own is not None else None)
        batch = _middle(self._batches, own.batch if own is not None else None)
        return None if steps_s is None or batch is None else Rate(steps_s, batch)

    def most(self, learner: str) -> MaxRates:
        """Returns the limits on a learner's counted reports."""
        own = self._rates.get(learner)
        steps_s = _middle(self._steps, own.steps_s if own is not None else None)
        tokens_s = _middle(self._tokens, own.tokens_s if own is not None else None)
        if steps_s is None or tokens_s is None:
            return HELD if len(self._starting) > (learner in self._starting) else MaxRates()
        return MaxRates(min(MAX_STEPS_S, FASTER * steps_s), min(MAX_TOKENS_S, FASTER * tokens_s))


def _middle(values: Sequence[float], own: float | None) -> float | None:
    """Returns the upper median of sorted values without `own`, or None if there are no others."""
    others = len(values) - (own is not None)
    if not others:
        return None
    middle = others // 2
    return values[middle + (own is not None and middle >= bisect_left(values, own))]


def parts_counted(weights: Mapping[str, float]) -> dict[str, float]:
    """Returns, for each learner, the fraction of its weight that counts in a merge (see the module's last rule)."""
    ordered, parts = sorted(weights.values()), {}
    for learner, weight in weights.items():
        usual = _middle(ordered, weight)
        parts[learner] = min(1.0, FASTER * usual / weight) if usual and weight else 1.0
    return parts


def counted(said: int, before: int, most_s: float, paid_until: float, now: float) -> tuple[int, float]:
    """Returns the part of a reported total that counts, and the time up to which this part uses the learner's time.

    said: the reported total. before: the part counted so far. most_s: limit per second. paid_until: the time that the
    last call returned, or the time of joining. Times are wall-clock seconds.
    """
    allowed = max(0, said - before)
    if most_s * (now - paid_until) < allowed:
        allowed = max(0, int(most_s * (now - paid_until)))
    if not allowed:
        return before, paid_until
    return before + allowed, max(paid_until + allowed / most_s, now - SPARE_S)


@dataclass(frozen=True, slots=True)
class Declared:
    """A contribution's tokens and inner steps."""

    tokens: int
    steps: int


def credited(
    said: Declared, reported: Declared, given: int, unheard_s: float, own: Rate | None, usual: Rate | None
) -> Declared:
    """Returns the part of a contribution's declared tokens and steps that counts.

    reported: the counted part of the learner's reports. given: tokens in its earlier contributions to this fragment.
    unheard_s: seconds since the learner's last report of new steps.
    """
    rate = own or usual
    if rate is None:
        return said
    ahead = OVERTAKEN * unheard_s * rate.steps_s + OVERTAKEN_STEPS
    if own is not None:
        ahead += OVERTAKEN_S * own.steps_s
    steps = max(1, min(said.steps, int(reported.steps + ahead)))
    if usual is None:  # the learner's reported tokens may be held back, and there is no other work to outweigh
        return Declared(said.tokens, steps)
    batch = _most_of_a_step(own, usual)
    most = min(reported.tokens + ahead * min(rate.batch, batch) - given, batch * steps)
    return Declared(max(1, min(said.tokens, int(most))), steps)


def _most_of_a_step(own: Rate | None, usual: Rate) -> float:
    """Returns the limit on a contribution's tokens per step.

    It depends on the learner's step rate, never on its reported batch.
    """
    few_steps = FASTER * usual.tokens_s / own.steps_s if own is not None else 0.0
    return max(MIXED * usual.batch, few_steps)
