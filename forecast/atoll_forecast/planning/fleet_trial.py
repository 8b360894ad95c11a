"""PURE: tries settings on a job's links, with a fleet in virtual time and the core's syncer."""

from __future__ import annotations

from dataclasses import dataclass

from atoll_server.settings import RunSettings

from atoll_forecast.fleet.fleet import Fleet
from atoll_forecast.fleet.learners import LearnerSpec
from atoll_forecast.fleet.schedule import Schedule
from atoll_forecast.planning.job import Job

LEARNERS = 12  # limit on simulated learners; the other learners of a region would behave in the same way
SYNCS = 8  # number of simulated syncs of every fragment
LONGEST_STEP_S = 10.0  # longer steps are scaled down, because reports come once per second, however long a step is


@dataclass(frozen=True, slots=True)
class Trial:
    """The mean results of a trial. staleness: staleness in outer steps. contributions: share of all learners that
    contribute to a merge.

    rounds: share of the due rounds that were merged.
    """

    staleness: float
    contributions: float
    rounds: float


def run_trial(job: Job, settings: RunSettings, trip_steps: float) -> Trial:
    """Tries settings without failures.

    trip_steps: steps from a round's opening to its end. Rounds that cannot end within the trial are not due.
    """
    shrink, quick = max(1.0, job.learners / LEARNERS), max(1.0, job.step_s / LONGEST_STEP_S)
    step_s = job.step_s / quick  # all other times are scaled by the same factor
    specs = []
    for region in job.regions:
        count = max(1, round(region.learners / shrink))
        specs += [
            LearnerSpec(
                f"{region.name}-{number:03}",
                step_s,
                jitter=0.05,
                up_bits_s=quick * min(region.bits_s / region.learners, job.core_bits_s / job.learners),
                down_bits_s=quick * min(region.bits_s, job.core_bits_s / len(job.regions)),
                delay_s=region.round_trip_s / 2 / quick,
            )
            for number in range(count)
        ]
    fragments = settings.fragments
    sizes = [job.bits / 8 * job.parameters / fragments] * fragments
    work = Schedule(sizes, {spec.name: 1 for spec in specs})
    fleet = Fleet(settings, fragments, specs, work, merge_s=job.merge_s(fragments) / quick)
    until_s = SYNCS * settings.inner_steps * step_s
    in_time = 0

    def until(fleet: Fleet) -> bool:
        nonlocal in_time
        if fleet.now < until_s:
            in_time = len(fleet.merges)
        return fleet.now >= until_s

    fleet.run(until)
    shares = [
        share for merge in fleet.merges[:in_time] for share in merge.shares
    ]  # merges are smaller while learners leave
    due = fragments * max(1.0, SYNCS - trip_steps / settings.inner_steps)
    staleness = sum(share.staleness for share in shares) / max(1, len(shares))
    return Trial(staleness, len(shares) / max(1, in_time) / len(specs), in_time / due)
