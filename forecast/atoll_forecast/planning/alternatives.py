"""PURE: estimates for other methods of training: data-parallel training, and the original DiLoCo."""

from __future__ import annotations

import math

from atoll_forecast.planning import bandwidth
from atoll_forecast.planning.job import MONTH_S, Job, Method, total

DILOCO_INNER_STEPS = 500  # arXiv 2311.08105


def data_parallel(job: Job) -> Method:
    """Returns the estimate for data-parallel training with bfloat16 gradients, which are reduced per region first.
    All learners wait for the slowest link, and for failed learners.
    """
    slowest = min(job.regions, key=lambda region: region.bits_s)
    trip_s = max(region.round_trip_s for region in job.regions)
    model = bandwidth.Model(job.parameters, job.step_s)
    step_s = (
        job.step_s
        if len(job.regions) == 1
        else bandwidth.data_parallel_step_s(model, slowest.bits_s, len(job.regions), round_trip_s=trip_s)
    )
    payload = bandwidth.exchange_factor(len(job.regions)) * job.parameters * bandwidth.BF16_BITS
    return _together("data-parallel", job, job.step_s / step_s, 2 * payload / step_s)


def diloco(job: Job) -> Method:
    """Returns the estimate for the original DiLoCo.

    Every 500 inner steps, all learners wait while the whole model is exchanged in float32.
    """
    slowest = min(region.bits_s for region in job.regions)
    payload = bandwidth.exchange_factor(len(job.regions)) * job.parameters * 32
    cycle_s = DILOCO_INNER_STEPS * job.step_s + payload / slowest + max(region.round_trip_s for region in job.regions)
    return _together(
        f"DiLoCo, H = {DILOCO_INNER_STEPS}", job, DILOCO_INNER_STEPS * job.step_s / cycle_s, 2 * payload / cycle_s
    )


def _together(name: str, job: Job, utilisation: float, bits_s: float) -> Method:
    """Returns the estimate for a job that stops when any learner fails. Failures during a stop cost no extra time."""
    lives = 1.0
    if not math.isinf(job.between_failures_s):
        each_s = job.between_failures_s / job.learners
        lives = each_s / (each_s + job.repair_s)
    region_gb = bits_s / 8e9 * MONTH_S
    price = total(region.costs(region_gb) for region in job.regions)
    return Method(name, utilisation, utilisation * lives, region_gb * len(job.regions), price, job.step_s)
