"""PURE: how much of what a learner says that it trained is counted. Nobody can see it train; the core has a clock.

- Reported steps and tokens count as far as the time since the last of them allows at a plausible rate: FASTER times
  that of most of the others, or the average of what counted of the learner so far. What is more is counted later,
  when time allows it.
- A contribution's tokens count as far as they were counted of its learner and not given to this fragment before, and
  what the time since its last report allows at its own rate, or that of the others while it has none: a contribution
  may overtake the report.
- Tokens of a step, which a weight grows with, are at most MIXED times those of the others' steps; or of its learner's,
  as far as it would not train faster by them than it may report.

Honest learners are below all of these; a liar has the influence of an honest learner on much better hardware.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
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


NOTHING = Most(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a learner trains: inner steps per second, tokens of each. mean: what counted of it since it first came.

    What it may report is measured by `mean` and not by how fast it seems now: that follows what it reports, and would
    let it report more from second to second.
    """

    steps_s: float
    batch: float
    mean: Most = NOTHING

    @property
    def tokens_s(self) -> float:
        """Tokens per second."""
        return self.steps_s * self.batch


class Rates:
    """Those of all learners at one moment."""

    def __init__(self, rates: Mapping[str, Rate]) -> None:
        self._rates, self.known = rates, len(rates)
        self._steps = sorted(rate.steps_s for rate in rates.values())
        self._batches = sorted(rate.batch for rate in rates.values())
        self._tokens = sorted(rate.tokens_s for rate in rates.values())

    def of(self, learner: str) -> Rate | None:
        """Its own."""
        return self._rates.get(learner)

    def usual(self, learner: str) -> Rate | None:
        """That of most of the others; None when there is no other."""
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
            return Most()
        before = own.mean if own is not None else NOTHING
        most_steps_s = min(MOST_STEPS_S, max(FASTER * steps_s, before.steps_s))
        return Most(most_steps_s, min(MOST_TOKENS_S, max(FASTER * tokens_s, before.tokens_s)))


def _middle(values: Sequence[float], own: float | None) -> float | None:
    """The upper median of sorted values, one's own left out."""
    others = len(values) - (own is not None)
    if not others:
        return None
    middle = others // 2
    return values[middle + (own is not None and middle >= bisect_left(values, own))]


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
    batch = _most_of_a_step(own, usual)
    most = min(reported.tokens + ahead * min(rate.batch, batch) - given, batch * steps)
    return Declared(max(1, min(said.tokens, int(most))), steps)


def _most_of_a_step(own: Rate | None, usual: Rate | None) -> float:
    """Tokens, in a contribution. Its own average alone says nothing: a liar's grows with the tokens that it reports."""
    of_others = MIXED * usual.batch if usual is not None else 0.0
    if own is None:
        return of_others
    if usual is None:
        return MIXED * own.batch
    plausible = max(FASTER * usual.tokens_s, own.mean.tokens_s) / own.steps_s
    return max(of_others, min(MIXED * own.batch, plausible))
