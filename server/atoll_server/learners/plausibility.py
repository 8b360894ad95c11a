"""PURE: limits how much of a learner's reported work counts. The core cannot observe training, but can measure time.

- Rate: the core counts reported steps and tokens up to FASTER times the other learners' median rate. Work above this
  rate counts later, as time passes. A learner's own earlier reports do not raise the limit.
- Start: while other learners have joined but none of their rates is known, a learner's tokens do not count yet. They
  count as soon as another learner's rate is known. If a learner is alone, all its tokens count.
- Contribution: its tokens count if the core has counted them in the learner's reports. Tokens in the learner's earlier
  contributions to the same fragment do not count again. Since a contribution may arrive before the report of its
  tokens, more tokens count for the time since the last report. The learner's own rate limits these additional tokens.
  If the learner's rate is not known yet, the others' median rate limits these tokens.
- Tokens per step: a contribution's weight grows with its tokens per step, which count up to the larger of two limits.
  The first limit is MIXED times the other learners' tokens per step. The second limit is FASTER times the others'
  tokens per second, divided by the learner's steps per second.
- Merge: a learner's weight is at most --weight-limit times the median weight of the others (see `parts_counted`).

Most honest learners stay below all of these limits. An honest learner with a much larger batch than the others may
reach --weight-limit. A learner with false reports has at most the influence of an honest learner on much better
hardware.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

FASTER = 10.0  # factor by which a learner may be faster than the others
MAX_STEPS_S, MAX_TOKENS_S = 2e3, 1e9  # limits per second for a learner that is alone, which no hardware exceeds
SPARE_S = 10.0  # largest unused time that later reports may use, since reports can arrive late
OVERTAKEN = 2.0  # multiple of a learner's rate up to which a contribution may be ahead of the last report
OVERTAKEN_STEPS, OVERTAKEN_S = (
    4.0,
    1.0,
)  # more steps and seconds by which a contribution may be ahead, since the last report may have been late
MIXED = 4.0  # multiple of the usual tokens per step up to which a contribution's tokens per step count


@dataclass(frozen=True, slots=True)
class MaxRates:
    """The limits on counted steps and tokens per second."""

    steps_s: float = MAX_STEPS_S
    tokens_s: float = MAX_TOKENS_S


HELD = MaxRates(MAX_STEPS_S, 0.0)  # limits while no other learner has a rate; steps count, since rounds need them


@dataclass(frozen=True, slots=True)
class Rate:
    """A learner's training rate.

    steps_s: inner steps per second on the core's clock. batch: reported tokens per step.
    """

    steps_s: float
    batch: float

    @property
    def tokens_s(self) -> float:
        """The reported tokens per second on the core's clock."""
        return self.steps_s * self.batch


class Rates:
    """The rates of all learners at one moment. starting: names of joined learners whose rate is not known yet."""

    def __init__(self, rates: Mapping[str, Rate], starting: Set[str] = frozenset()) -> None:
        self._rates = rates
        self._starting = starting
        self.known = len(rates)
        self._steps = sorted(rate.steps_s for rate in rates.values())
        self._batches = sorted(rate.batch for rate in rates.values())
        self._tokens = sorted(rate.tokens_s for rate in rates.values())

    def of(self, learner: str) -> Rate | None:
        """Returns the learner's own rate, or None if the rate is not known yet."""
        return self._rates.get(learner)

    def usual(self, learner: str) -> Rate | None:
        """Returns the median rate of the other learners, or None if no other learner's rate is known."""
        own = self._rates.get(learner)
        steps_s = _middle(self._steps, own.steps_s if own is not None else None)
        batch = _middle(self._batches, own.batch if own is not None else None)
        return None if steps_s is None or batch is None else Rate(steps_s, batch)

    def most(self, learner: str) -> MaxRates:
        """Returns the largest rates at which a learner's reported steps and tokens count."""
        own = self._rates.get(learner)
        steps_s = _middle(self._steps, own.steps_s if own is not None else None)
        tokens_s = _middle(self._tokens, own.tokens_s if own is not None else None)
        if steps_s is None or tokens_s is None:
            return HELD if len(self._starting) > (learner in self._starting) else MaxRates()
        return MaxRates(min(MAX_STEPS_S, FASTER * steps_s), min(MAX_TOKENS_S, FASTER * tokens_s))


def _middle(values: Sequence[float], own: float | None) -> float | None:
    """Returns the upper median of sorted values without `own`, or None if there are no other values."""
    others = len(values) - (own is not None)
    if not others:
        return None
    middle = others // 2
    return values[middle + (own is not None and middle >= bisect_left(values, own))]


def parts_counted(weights: Mapping[str, float], most: float) -> dict[str, float]:
    """Returns the fraction of each learner's weight that counts in a merge, from 0 to 1.

    weights: weight of each learner. most: limit on a learner's weight, as a multiple of the median of the others'
    weights.
    """
    ordered, parts = sorted(weights.values()), {}
    for learner, weight in weights.items():
        usual = _middle(ordered, weight)
        parts[learner] = min(1.0, most * usual / weight) if usual and weight else 1.0
    return parts


def counted(said: int, before: int, most_s: float, paid_until: float, now: float) -> tuple[int, float]:
    """Returns the part of a reported total that counts, and the `paid_until` for the next call.

    At most `most_s` steps or tokens count for each second since `paid_until`. Counted work uses up this time, so the
    returned `paid_until` is later. Later calls can use at most SPARE_S seconds of the unused time. said: the reported
    total. before: the part that counted at the last call. most_s: limit per second.
    paid_until: the time that the last call returned, or the time of joining. Times are wall-clock seconds.
    """
    allowed = max(0, said - before)
    if most_s * (now - paid_until) < allowed:
        allowed = max(0, int(most_s * (now - paid_until)))
    if not allowed:
        return before, paid_until
    return before + allowed, max(paid_until + allowed / most_s, now - SPARE_S)


@dataclass(frozen=True, slots=True)
class Declared:
    """The tokens and inner steps that a contribution or a learner's reports declare."""

    tokens: int
    steps: int


def credited(
    said: Declared, reported: Declared, given: int, unheard_s: float, own: Rate | None, usual: Rate | None
) -> Declared:
    """Returns how many of a contribution's declared tokens and steps count.

    said: the declared numbers. reported: the numbers that count in the learner's reports. given: tokens in the
    learner's earlier contributions to the fragment. unheard_s: seconds since the learner's last report of new steps.
    own: the learner's rate. usual: the median rate of the other learners.
    """
    rate = own or usual
    if rate is None:
        return said
    ahead = OVERTAKEN * unheard_s * rate.steps_s + OVERTAKEN_STEPS
    if own is not None:
        ahead += OVERTAKEN_S * own.steps_s
    steps = max(1, min(said.steps, int(reported.steps + ahead)))
    if usual is None:  # without another learner's rate, reported tokens may not count yet
        return Declared(said.tokens, steps)
    batch = _most_of_a_step(own, usual)
    most = min(reported.tokens + ahead * min(rate.batch, batch) - given, batch * steps)
    return Declared(max(1, min(said.tokens, int(most))), steps)


def _most_of_a_step(own: Rate | None, usual: Rate) -> float:
    """Returns the limit on a contribution's tokens per step.

    The limit does not depend on the learner's reported tokens per step, which could be false.
    """
    few_steps = FASTER * usual.tokens_s / own.steps_s if own is not None else 0.0
    return max(MIXED * usual.batch, few_steps)
