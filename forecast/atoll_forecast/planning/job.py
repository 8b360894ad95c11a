"""PURE: what is to be trained, and a way to train it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from atoll_forecast.planning import bandwidth

MONTH_S = 30 * 86_400.0
MERGE_S, MERGE_EACH_S = 3.2e-9, 0.7e-9  # of a core: for each parameter, and for each contribution to it


@dataclass(frozen=True, slots=True)
class Region:
    """One place with learners behind one link to the core. bits_s: each way.

    price_gb: of a gigabyte, either way; None: nobody said.
    """

    name: str
    learners: int
    bits_s: float
    round_trip_s: float
    price_gb: float | None = None

    def costs(self, gigabytes: float) -> float | None:
        """Of so many over its link."""
        return None if self.price_gb is None else gigabytes * self.price_gb


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained. step_s: an inner step of a learner. between_failures_s: of one learner, mean.

    repair_s: from its failure to its next step. bits: on the wire for each parameter, headers included. core_bits_s: of
    the core's own link, each way.
    """

    parameters: float
    step_s: float
    regions: tuple[Region, ...]
    between_failures_s: float = math.inf
    repair_s: float = 600.0
    bits: float = bandwidth.CODED_BITS
    core_bits_s: float = math.inf

    @property
    def learners(self) -> int:
        """In all regions."""
        return sum(region.learners for region in self.regions)

    def merge_s(self, fragments: int) -> float:
        """Of one of so many fragments, with everybody's contribution."""
        return self.parameters / fragments * (MERGE_S + MERGE_EACH_S * self.learners)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train this job. utilisation: of the learners' time, while nothing fails. goodput: with failures.

    month_price: None where a region has no price. step_s: of an inner step that nothing holds up.
    """

    name: str
    utilisation: float
    goodput: float
    month_gb: float
    month_price: float | None
    step_s: float

    @property
    def thousand_steps(self) -> float:
        """A thousand inner steps of everybody, as a part of a month: in a month one way trains more than another."""
        return 1000 * self.step_s / self.utilisation / MONTH_S


def total(prices: Iterable[float | None]) -> float | None:
    """None where one is not known."""
    known = list(prices)
    return None if None in known else math.fsum(price for price in known if price is not None)
