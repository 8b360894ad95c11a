"""Simulates the goodput of many chips under failures (Table 1 of arXiv 2604.21428).

A learner's chips are grouped into slices, and a failed chip stops its slice. An elastic learner then pauses, and
continues with fewer slices. It pauses again, for a shorter time, when the slice returns. Failures and repairs during a
pause do not extend it, so pauses coalesce at high failure rates. A learner that is not elastic restarts as a whole, on
spare slices. Learners fail independently: each of M learners loses the same share of its time as a single learner with
1/M of the chips.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

YEAR_S = 365.25 * 86_400


@dataclass(frozen=True, slots=True)
class Failures:
    """The rates and durations of failures and pauses. The paper does not state these values. The defaults minimise the
    RMSE over Table 1.

    per_chip_year: rate of a Poisson process. slice_chips: chips that fail together. downscale_s, upscale_s: pauses of
    an elastic learner. repair_s, repair_shape: mean and shape of the Weibull distribution of repair times.
    restart_s: restart time of a learner that is not elastic.
    """

    per_chip_year: float = 1.0
    slice_chips: int = 256
    downscale_s: float = 18.0
    upscale_s: float = 2.0
    repair_s: float = 3600.0
    repair_shape: float = 1.0
    restart_s: float = 76.0


@dataclass(frozen=True, slots=True)
class Expected:
    """The results of a simulation.

    goodput: useful share of all chip-seconds. uptime: share of the time in which at least one learner trains.
    """

    goodput: float
    uptime: float


def simulate(
    chips: int, learners: int, failures: Failures, *, elastic: bool = True, hours: float = 30.0, seed: int = 0
) -> Expected:
    """Simulates a fleet of equal learners.

    hours: simulated time. A simulation of 2.4 million chips takes one or two seconds.
    """
    random = Random(f"{seed}/{chips}/{learners}/{elastic}")  # noqa: S311 - not a secret
    of_each = [_learner(chips / learners, failures, elastic, hours * 3600, random) for _ in range(learners)]
    idle = math.prod(1 - running for _, running in of_each)  # learners fail independently
    return Expected(sum(useful for useful, _ in of_each) / learners, 1 - idle)


def _learner(chips: float, failures: Failures, elastic: bool, until: float, random: Random) -> tuple[float, float]:
    """Returns the useful share of a learner's chip-seconds, and the share of the time in which it trains."""
    slices = max(1, round(chips / failures.slice_chips))
    each_s = YEAR_S / (failures.per_chip_year * chips / slices)  # seconds between failures of one slice
    scale = failures.repair_s / math.gamma(1 + 1 / failures.repair_shape)
    now = 0.0
    there = slices
    paused_until = 0.0
    useful = 0.0
    running = 0.0
    returns: list[float] = []
    while now < until:
        fails = now + random.expovariate(there / each_s) if there else math.inf
        comes = returns[0] if returns else math.inf
        then = min(fails, comes, until)
        trained = max(0.0, then - max(now, paused_until))
        useful += there * trained
        running += trained if there else 0.0
        now = then
        if now == until:
            break
        if not elastic:
            pause_s = failures.restart_s
        elif now == comes:
            heapq.heappop(returns)
            there, pause_s = there + 1, failures.upscale_s
        else:
            heapq.heappush(returns, now + random.weibullvariate(scale, failures.repair_shape))
            there, pause_s = there - 1, failures.downscale_s
        if now >= paused_until:
            paused_until = now + pause_s
    return useful / (slices * until), running / until


def table(
    chips: Sequence[int], learners: Sequence[int], failures: Failures, hours: float = 30.0
) -> dict[str, list[float]]:
    """Returns goodput in percent, as in Table 1.

    Rows: "dp", "elastic" and each number of learners. Columns: numbers of chips.
    """
    rows = {"dp": (1, False), "elastic": (1, True)} | {str(count): (count, True) for count in learners}
    return {
        name: [100 * simulate(each, count, failures, elastic=elastic, hours=hours).goodput for each in chips]
        for name, (count, elastic) in rows.items()
    }


def rmse(ours: dict[str, list[float]], theirs: dict[str, tuple[int, ...]]) -> float:
    """Returns the root mean squared difference over all cells, in percentage points."""
    squares = [(a - b) ** 2 for name, row in theirs.items() for a, b in zip(ours[name], row, strict=True)]
    return math.sqrt(sum(squares) / len(squares))
