"""PURE: describes a training job, and the expected figures of a training method."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from atoll_forecast.planning import bandwidth

MONTH_S = 30 * 86_400.0
MERGE_S, MERGE_EACH_S = 3.2e-9, 0.7e-9  # seconds of a merge per parameter, and per parameter and contribution


@dataclass(frozen=True, slots=True)
class Region:
    """A region whose learners share one link to the core.

    bits_s: rate each way, in bits per second. price_gb: price per gigabyte in either direction; None if unknown.
    """

    name: str
    learners: int
    bits_s: float
    round_trip_s: float
    price_gb: float | None = None

    def costs(self, gigabytes: float) -> float | None:
        """Returns the price of sending this many gigabytes over the region's link, or None if the price is unknown."""
        return None if self.price_gb is None else gigabytes * self.price_gb


@dataclass(frozen=True, slots=True)
class Job:
    """A training job. step_s: duration of an inner step. between_failures_s: mean time between failures of one learner.

    repair_s: time from a failure to the learner's next step. bits: bits per parameter on the wire, including headers.
    core_bits_s: rate of the core's own link, each way, in bits per second.
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
        """The number of learners in all regions."""
        return sum(region.learners for region in self.regions)

    def merge_s(self, fragments: int) -> float:
        """Returns the duration of a merge of one fragment, in seconds, with contributions of all learners.

        fragments: number of fragments of the model.
        """
        return self.parameters / fragments * (MERGE_S + MERGE_EACH_S * self.learners)


@dataclass(frozen=True, slots=True)
class Method:
    """A training method for a job, with its expected figures.

    utilisation: useful share of the learners' time without failures. goodput: the same share with failures.
    month_gb: gigabytes per month over all links. month_price: price per month, or None if a region has no price.
    step_s: duration of an inner step without stalls.
    """

    name: str
    utilisation: float
    goodput: float
    month_gb: float
    month_price: float | None
    step_s: float

    @property
    def thousand_steps(self) -> float:
        """The months that all learners need for a thousand inner steps, for comparing methods of different speeds."""
        return 1000 * self.step_s / self.utilisation / MONTH_S


def total(prices: Iterable[float | None]) -> float | None:
    """Returns the sum of prices, or None if one of them is unknown."""
    known = list(prices)
    return None if None in known else math.fsum(price for price in known if price is not None)
