"""Simulates learners of different speeds, and learners that join for a while, in virtual time and without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from atoll_server.settings import RunSettings

from atoll_forecast.fleet.fleet import Fleet
from atoll_forecast.fleet.learners import LearnerSpec
from atoll_forecast.fleet.schedule import Schedule

FRAGMENT_BYTES = 1.0  # negligible, because these simulations do not examine links


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation. goodput: share of learner-seconds whose work was merged.

    shares: mean number of contributions per merge. staleness: mean staleness in outer steps. seconds: virtual time of
    the run.
    """

    goodput: float
    shares: float
    staleness: float
    seconds: float


def mixed(speeds: Sequence[float], settings: RunSettings, *, jitter: float, steps: float, seed: int = 0) -> Outcome:
    """Simulates learners with these relative speeds. A learner with speed 1 takes `steps` steps of one second."""
    specs = [LearnerSpec(f"learner-{i:03}", 1 / speed, jitter=jitter, delay_s=0.05) for i, speed in enumerate(speeds)]
    return _run(specs, settings, steps * sum(speeds), seed)


def lockstep(speeds: Sequence[float], *, jitter: float, overlap: int, steps: int, seed: int = 0) -> float:
    """Returns the goodput if every merge waits for all learners.

    No learner begins a step before all learners have ended the step `overlap` + 1 steps earlier.
    """
    random = Random(seed)  # noqa: S311 - not a secret
    ended = [0.0] * len(speeds)
    gates = [0.0] * (overlap + 1)
    trained_s = 0.0
    for step in range(steps):
        for index, speed in enumerate(speeds):
            step_s = max(0.1, random.gauss(1.0, jitter)) / speed
            trained_s += step_s
            ended[index] = max(ended[index], gates[step % len(gates)]) + step_s
        gates[step % len(gates)] = max(ended)
    return trained_s / (len(speeds) * max(ended))


def scavenged(learners: int, extra: float, settings: RunSettings, *, steps: float, seed: int = 0) -> float:
    """Returns the training time relative to no extra compute. `extra` x `learners` join after half of the tokens."""
    own = [LearnerSpec(f"learner-{i:03}", delay_s=0.05) for i in range(learners)]
    guests = [LearnerSpec(f"guest-{i:03}", delay_s=0.05, joins_at_s=steps / 2) for i in range(round(extra * learners))]
    alone = _run(own, settings, steps * learners, seed)
    return _run([*own, *guests], settings, steps * learners, seed).seconds / alone.seconds


def scavenged_data_parallel(extra: float, exchange: float) -> float:
    """Returns the result of `scavenged` for data-parallel training, whose all-reduce then spans two sites.

    exchange: time to exchange a whole model, in steps. A ring over 1 + extra equal parts takes 2 (1 - 1/(1 + extra))
    times this.
    """
    return 0.5 + 0.5 * (1 + exchange * 2 * (1 - 1 / (1 + extra))) / (1 + extra)


def _run(specs: Sequence[LearnerSpec], settings: RunSettings, steps: float, seed: int) -> Outcome:
    """Runs a fleet until `steps` inner steps, summed over learners, have been merged."""
    fragments = settings.fragments or 24
    work = Schedule([FRAGMENT_BYTES] * fragments, {spec.name: 1 for spec in specs})
    fleet = Fleet(settings, fragments, specs, work, seed=seed)
    at_end: list[Outcome] = []

    def until(fleet: Fleet) -> bool:
        if work.merged_steps >= steps and not at_end:
            merged_s = sum(work.merged.get(spec.name, 0.0) * spec.step_s for spec in specs)
            there_s = sum(fleet.now - spec.joins_at_s for spec in specs)
            shares = [share.staleness for merge in fleet.merges for share in merge.shares]
            each = len(shares) / len(fleet.merges)
            at_end.append(Outcome(merged_s / there_s, each, sum(shares) / len(shares), fleet.now))
        return bool(at_end)

    fleet.run(until)
    return at_end[0]
