"""Pairs of values, one from the paper and one from our simulations, for tables, plots and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll_server.quorum import Quorum
from atoll_server.settings import RunSettings

from atoll_forecast.paper import figures, goodput, hardware
from atoll_forecast.planning import bandwidth

LEARNERS = (2, 4, 8, 16)
ONE_SLOW = (1.0,) * 7 + (0.82,)
JITTER = 0.1
PAPER_INNER_STEPS, PAPER_OVERLAP = 24, 2


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure. ours: our value. theirs: the paper's value, or None. how: the method that gave our value."""

    name: str
    ours: float
    theirs: float | None
    unit: str
    how: str


def goodput_claims(failures: goodput.Failures, hours: float) -> dict[str, list[float]]:
    """Returns all 30 cells of Table 1: goodput in percent, by method and number of chips. hours: simulated time."""
    return goodput.table(figures.CHIPS, LEARNERS, failures, hours)


def bandwidth_claims() -> list[Claim]:
    """Returns link rates by the paper's accounting, with the paper's bits per parameter and with Atoll's."""
    model, steps = bandwidth.Model(), PAPER_INNER_STEPS
    two, eight = (
        bandwidth.data_parallel_bits_s(model, sites, utilisation) for sites, utilisation in ((2, 0.90), (8, 0.95))
    )
    by_theirs: Callable[[float, float], float] = lambda bits, spread: bandwidth.decoupled_bits_s(  # noqa: E731
        model, steps, bits, spread
    )
    ours_bits_s = [
        (two, "bf16, 90 % of the time computing"),
        (eight, "bf16, 95 % of the time computing"),
        (by_theirs(bandwidth.BF16_BITS, PAPER_OVERLAP), "16 bits, a fragment in two steps"),
        (by_theirs(bandwidth.INT4_BITS, PAPER_OVERLAP), "4.125 bits, a fragment in two steps"),
        (by_theirs(bandwidth.INT4_BITS, 1), "4.125 bits, a fragment per step"),
    ]
    theirs = [
        Claim(name, ours / 1e9, value, "Gbit/s", how)
        for (name, value), (ours, how) in zip(figures.BANDWIDTH.items(), ours_bits_s, strict=True)
    ]
    coded = f"{bandwidth.CODED_BITS:g} bits, as measured"
    return [
        *theirs,
        Claim("Atoll, int4, a fragment in two steps", by_theirs(bandwidth.CODED_BITS, 2) / 1e9, None, "Gbit/s", coded),
        Claim("Atoll, int4, a fragment per step", by_theirs(bandwidth.CODED_BITS, 1) / 1e9, None, "Gbit/s", coded),
    ]


def scavenging_claims(steps: float = 1200.0) -> list[Claim]:
    """Returns the training time with extra compute for half of the tokens, relative to no extra compute.

    steps: inner steps of each learner in the run without extra compute.
    """
    rows = []
    for extra, theirs in figures.SCAVENGING.items():
        ours = hardware.scavenged(8, extra, RunSettings(), steps=steps)
        rows.append(
            Claim(
                f"+{extra:.0%} learners",
                ours,
                theirs,
                "of the time",
                "a simulated fleet with the core's scheduling code",
            )
        )
    for extra, theirs in figures.SCAVENGING_DATA_PARALLEL.items():
        ours = hardware.scavenged_data_parallel(extra, exchange=1.0)
        how = "an exchange of the whole model takes one step"
        rows.append(Claim(f"+{extra:.0%} chips, data-parallel", ours, theirs, "of the time", how))
    return rows


def hardware_claims(steps: int = 2000) -> list[Claim]:
    """Returns goodput in percent for eight learners. One is 18 % slower; step times have 10 % jitter."""
    one = RunSettings(quorum=Quorum(learners=1), overlap_steps=PAPER_OVERLAP)
    bare = RunSettings(quorum=Quorum(learners=1), overlap_steps=PAPER_OVERLAP, grace_ratio=0)
    waited = hardware.lockstep(ONE_SLOW, jitter=JITTER, overlap=PAPER_OVERLAP, steps=10 * steps)
    ours = [100 * waited, *(100 * hardware.mixed(ONE_SLOW, s, jitter=JITTER, steps=steps).goodput for s in (bare, one))]
    simulated = "a simulated fleet with the core's scheduling code"
    hows = ["every merge waits for all learners", simulated, simulated]
    return [
        Claim(name, mine, theirs, "%", how)
        for (name, theirs), mine, how in zip(figures.HARDWARE.items(), ours, hows, strict=True)
    ]
