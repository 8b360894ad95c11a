"""PURE: the learning rate and momentum of an outer step, or of a merge that is a fraction of an outer step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from atoll_wire.layout.frame_spans import Codec

from atoll_server.rounds.syncer_events import Cause
from atoll_server.settings import RunSettings


def part_of(weights: Iterable[float]) -> float:
    """Returns the fraction of an outer step that a merge takes, which is the sum of its weights, at most 1."""
    whole = math.fsum(weights)
    return 1.0 if whole > 1 - 1e-9 else whole


@dataclass(frozen=True, slots=True)
class OuterRule:
    """The parameters of one outer step. lr, momentum: for Nesterov's method. codec: for the published update.

    heat: 1 during the run; falls to 0 at the run's end. At 0, tensors of all kinds are averaged. age: the new
    version's age in outer steps (see RoundState.age). A merge uses neither staleness_exponent nor age, which are only
    recorded in the ledger.
    """

    lr: float
    momentum: float
    codec: Codec
    heat: float = 1.0
    staleness_exponent: float = 0.0
    age: float = 0.0

    @classmethod
    def of(cls, settings: RunSettings, age: float, cause: Cause, tokens: int) -> OuterRule:
        """Returns the rule for a merge.

        age: the new version's age in outer steps. tokens: number of tokens that all learners have trained on so far.

        At the end of the run, and after all learners have left, the outer step is a plain mean. A Nesterov step
        overshoots the mean. Later inner steps correct this overshoot, but no inner steps follow the last merge
        (records/quality).
        """
        heat = 0.0 if cause is Cause.LEFT else settings.heat(tokens)
        return cls(*settings.outer_at(age, heat), settings.codec, heat, settings.staleness_exponent, age)

    def decay_and_push(self, part: float) -> tuple[float, float]:
        """Returns the (decay, push) arguments of `merging.merge_kernels.frame_step`.

        part: the fraction of an outer step that the merge takes. The momentum is multiplied by mu**part, where mu is
        `self.momentum`. Merges that add up to one outer step thus multiply it by mu. In the long run, a unit of work
        moves the parameters by lr / (1 - mu). This holds whether all learners' work is merged together or in parts.
        """
        decay = self.momentum**part
        return decay, self.momentum * (1 - decay) / (1 - self.momentum)
