"""PURE: how one outer step is made: rate, momentum, and what a part of a step is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from atoll_wire.spans import Codec

from atoll_server.rounds.events import Cause
from atoll_server.settings import RunSettings


def part_of(weights: Iterable[float]) -> float:
    """Of an outer step: what the weights of its merge sum to, 1 at most."""
    whole = math.fsum(weights)
    return 1.0 if whole > 1 - 1e-9 else whole


@dataclass(frozen=True, slots=True)
class OuterRule:
    """How one outer step is made. lr and momentum of Nesterov's method; codec of the published update.

    heat: from 1 in the run to 0 at its end, when every piece is averaged, whatever its kind. staleness_exponent: that
    its weights have; age: of the version that it makes (FragmentRounds); for the ledger.
    """

    lr: float
    momentum: float
    codec: Codec
    heat: float = 1.0
    staleness_exponent: float = 0.0
    age: float = 0.0

    @classmethod
    def of(cls, settings: RunSettings, age: float, cause: Cause, tokens: int) -> OuterRule:
        """Of the merge that makes a version of this age. tokens: that the run has trained.

        At the end, and when everybody has left, it gives the mean of what the learners had. Nesterov's step goes
        further, and inner steps make good what is too far: those that are still to come (records/quality).
        """
        heat = 0.0 if cause is Cause.LEFT else settings.heat(tokens)
        return cls(*settings.outer_at(age, heat), settings.codec, heat, settings.staleness_exponent, age)

    def decay_and_push(self, part: float) -> tuple[float, float]:
        """What momentum is multiplied with before this part of an outer step, and how far it pushes in it.

        Momentum fades with the work that is merged. Whether that comes in merges of everybody's or in many of few (in
        equal parts), a unit of it moves the parameters by lr / (1 - mu) in the long run.
        """
        decay = self.momentum**part
        return decay, self.momentum * (1 - decay) / (1 - self.momentum)
