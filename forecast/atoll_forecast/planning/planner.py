"""PURE: plans the settings of a run and estimates its link load, cost, goodput and memory.

Sizes and times are sums of measured figures (docs/benchmarks/sync-cost.md, records/). A trial in virtual time with the
core's syncer shows whether the links are fast enough for the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll_server.links.link import ARRIVAL_STEPS
from atoll_server.memory_budget import needed_bytes
from atoll_server.rounds.liveness import LIVE_REPORTS, LIVE_STEPS
from atoll_server.settings import RunSettings
from atoll_wire.contract import REPORT_S
from atoll_wire.layout.layout import DEFAULT_FRAGMENTS

from atoll_forecast.fleet.fleet import PER_BOUNDARY
from atoll_forecast.planning import bandwidth
from atoll_forecast.planning.alternatives import DILOCO_INNER_STEPS, data_parallel, diloco
from atoll_forecast.planning.fleet_trial import Trial, run_trial
from atoll_forecast.planning.job import MONTH_S, Job, Method, Region, total
from atoll_forecast.planning.shards import WAITING_BYTES, Sharding, disk_bytes, sharding

LINK_SHARE = 0.7  # share of a link's rate that a plan may use, because links carry other traffic and their rates vary
MIN_INNER_STEPS = 24  # the paper's value; fewer steps are better only in short runs (records/quality)
MAX_BLOCKED = 0.05  # limit on the step boundaries' share of the learners' time; H grows until the share is smaller
BLOCKED_S = 1.3e-9  # duration of step boundaries, per parameter taken and adopted, on a CPU
ROUND_UP_BYTES, ROUND_DOWN_BYTES = 1200.0, 2800.0  # bytes per round without payloads: headers, receipts (records/wan)
LEARNER_BYTES = 7.4  # bytes of host memory per parameter
MARGIN = 1.25  # factor on the mean time of steps, trips and rounds
MIN_MERGED = 0.9  # smallest share of the learners in each merge; below it, the plan warns
MAX_CONTRIBUTIONS_S = 100.0  # contributions per second to one core; higher rates were never measured
SHARD_BYTES = 512 << 30  # default for the memory of a shard's machine, in bytes
MIN_GOODPUT = 0.1
HOME = "at the core"
KNOWN_INNER_STEPS = 96  # the largest H for which losses were compared (records/quality)


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """The load of one region's link. The contributions of its learners go up, and each update comes down once.

    up_bits_s, down_bits_s: rates in bits per second. share: used share of the link's rate in the busier direction.
    month_gb: gigabytes per month, both ways.
    """

    region: Region
    up_bits_s: float
    down_bits_s: float

    @property
    def share(self) -> float:
        return max(self.up_bits_s, self.down_bits_s) / self.region.bits_s

    @property
    def month_gb(self) -> float:
        return (self.up_bits_s + self.down_bits_s) / 8e9 * MONTH_S


@dataclass(frozen=True, slots=True)
class RegionLoss:
    """The effect of losing a whole region.

    pace: share of the run's learners that remain. silent_s: seconds after which rounds no longer wait for the region.
    budget_s: seconds for which the region may be cut off until work of its learners is discarded.
    """

    region: str
    pace: float
    silent_s: float
    budget_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run, and its expected figures. staleness: mean staleness in outer steps.

    why: the reason for H. core: load of the core's own link. others: alternative methods.
    contributions: share of all learners that contribute to a merge, without failures. works: whether the plan is
    feasible; if False, ignore the figures. core_bytes, disk_bytes: memory and disk of one core with all fragments.
    """

    settings: RunSettings
    why: str
    carried: tuple[LinkLoad, ...]
    core: LinkLoad
    atoll: Method
    others: tuple[Method, ...]
    staleness: float
    contributions: float
    core_bytes: int
    disk_bytes: float
    learner_bytes: float
    losses: tuple[RegionLoss, ...]
    warnings: tuple[str, ...]
    works: bool
    sharding: Sharding


def plan(job: Job, fragments: int = 0, shard_bytes: float = SHARD_BYTES) -> Plan:
    """Plans a job with the smallest H that its links and step boundaries allow, and the smallest tau that hides a round
    trip.

    fragments: number of fragments; 0: the default, 24. shard_bytes: memory of a shard's machine.
    """
    count = fragments or DEFAULT_FRAGMENTS
    inner_steps, why = _inner_steps(job, count)
    overlap = _overlap(job, count, inner_steps)
    settings = RunSettings(inner_steps=inner_steps, fragments=count, overlap_steps=overlap)
    carried = tuple(_carried(job, region, count, inner_steps) for region in job.regions)
    core = _together(job, carried)
    silent_s = max(LIVE_STEPS * job.step_s, LIVE_REPORTS * REPORT_S)
    budget_s = (settings.max_staleness - ARRIVAL_STEPS) * inner_steps * job.step_s
    losses = tuple(RegionLoss(r.name, 1 - r.learners / job.learners, silent_s, budget_s) for r in job.regions)
    utilisation = 1 / (1 + _blocked(job) / inner_steps)
    trial = run_trial(job, settings, _longest_trip(job, count))
    atoll = _atoll(job, carried, inner_steps, overlap, utilisation)
    waiting_bytes = WAITING_BYTES * job.learners * settings.max_staleness
    divided = sharding(job.parameters, count, shard_bytes, waiting_bytes)
    return Plan(
        settings,
        why,
        carried,
        core,
        atoll,
        (data_parallel(job), diloco(job)),
        trial.staleness,
        trial.contributions,
        needed_bytes(job.parameters),
        disk_bytes(job.parameters, job.parameters, waiting_bytes),
        LEARNER_BYTES * job.parameters,
        losses,
        tuple(_warnings(job, (*carried, core), trial, settings, atoll, divided, shard_bytes)),
        all(each.share <= 1 for each in (*carried, core))
        and trial.rounds >= MIN_MERGED
        and divided.memory_bytes <= shard_bytes
        and atoll.goodput >= MIN_GOODPUT,
        divided,
    )


def _warnings(
    job: Job,
    carried: Sequence[LinkLoad],
    trial: Trial,
    settings: RunSettings,
    atoll: Method,
    divided: Sharding,
    shard_bytes: float,
) -> Iterator[str]:
    for each in carried:
        if each.share > LINK_SHARE:
            home = each.region.name == HOME
            who, remedy = (
                ("the core", "use") if home else (f"region {each.region.name}", "leave the region out, or use")
            )
            yield (
                f"{who} needs {each.share:.0%} of its link, even with {DILOCO_INNER_STEPS} inner steps: "
                f"{remedy} fewer learners{'' if home else ' there'}, longer steps, or a faster link"
            )
    if trial.rounds < MIN_MERGED:
        yield (
            f"only {trial.rounds:.0%} of the rounds reach a merge in time: "
            "use longer steps, or links with a higher rate or a shorter round trip"
        )
    elif trial.contributions < MIN_MERGED:
        yield (
            f"merges contain the work of only {trial.contributions:.0%} of the learners: "
            "use links with a higher rate or a shorter round trip"
        )
    if _blocked(job) / MAX_BLOCKED > DILOCO_INNER_STEPS:
        yield (
            f"step boundaries take {1 - atoll.utilisation:.1%} of the learners' time: use longer steps, or smaller "
            "models"
        )
    if settings.inner_steps > KNOWN_INNER_STEPS:
        yield (
            f"H = {settings.inner_steps}: losses were measured only up to {KNOWN_INNER_STEPS}, and are higher above "
            "24 in short runs (docs/benchmarks/paper.md): test this H, or use faster links"
        )
    if atoll.goodput < MIN_GOODPUT:
        yield f"goodput is {atoll.goodput:.1%}, below {MIN_GOODPUT:.0%}: make failures rarer or repairs faster"
    each_s = divided.share * job.learners * settings.fragments / (settings.inner_steps * job.step_s)
    if each_s > MAX_CONTRIBUTIONS_S:
        yield (
            f"a core receives {each_s:.0f} contributions per second, more than any benchmark measured: "
            "lower --fragments"
        )
    if divided.memory_bytes > shard_bytes:
        yield (
            f"each of {divided.shards} shards needs {divided.memory_bytes / 2**30:,.0f} GiB, but --shard-memory is "
            f"{shard_bytes / 2**30:,.0f} GiB: raise --fragments, or use larger machines"
        )


def _carried(job: Job, region: Region, fragments: int, inner_steps: float) -> LinkLoad:
    each = bandwidth.decoupled_bits_s(bandwidth.Model(job.parameters, job.step_s), inner_steps, job.bits)
    rounds_s = fragments / (inner_steps * job.step_s)
    up, down = each + 8 * ROUND_UP_BYTES * rounds_s, each + 8 * ROUND_DOWN_BYTES * rounds_s
    return LinkLoad(region, region.learners * up, down)


def _together(job: Job, carried: Sequence[LinkLoad]) -> LinkLoad:
    """Returns the load of the core's own link. Its up_bits_s is the rate that arrives at the core."""
    home = Region(HOME, job.learners, job.core_bits_s, 0.0)
    return LinkLoad(home, sum(each.up_bits_s for each in carried), sum(each.down_bits_s for each in carried))


def _blocked(job: Job) -> float:
    """Returns the duration of step boundaries per sync of the whole model, in steps."""
    return BLOCKED_S * job.parameters / job.step_s


def _inner_steps(job: Job, fragments: int) -> tuple[int, str]:
    whole = [
        _carried(job, region, fragments, 1) for region in job.regions
    ]  # with a sync of the whole model at every step
    links = max(each.share for each in (*whole, _together(job, whole))) / LINK_SHARE
    needed, why = max(
        (MIN_INNER_STEPS, "the paper's value"),
        (math.ceil(links), "the smallest value that the links allow"),
        (math.ceil(MARGIN * _longest_trip(job, fragments)), "the smallest value that covers a sync"),
        (
            math.ceil(MARGIN * fragments / PER_BOUNDARY),
            f"the smallest value with which learners answer {fragments} fragments in time",
        ),
        (math.ceil(_blocked(job) / MAX_BLOCKED), f"the smallest value with step boundaries below {MAX_BLOCKED:.0%}"),
        key=lambda candidate: candidate[0],
    )
    if needed > DILOCO_INNER_STEPS:
        return DILOCO_INNER_STEPS, "DiLoCo's value, the largest recommended"
    return needed, why


def trip_steps(job: Job, region: Region, fragments: int) -> float:
    """Returns the number of steps from a round's opening to the adoption of its update.

    This includes waits for step boundaries, transfers, two round trips, and a merge.
    """
    size_bits = job.bits * job.parameters / fragments
    carried_s = size_bits * (region.learners + 1) / region.bits_s
    carried_s += size_bits * (job.learners + len(job.regions)) / job.core_bits_s
    return 1.0 + (carried_s + 2 * region.round_trip_s + job.merge_s(fragments)) / job.step_s


def _overlap(job: Job, fragments: int, inner_steps: int) -> float:
    least: float = RunSettings().overlap_steps
    return float(min(max(least, math.ceil(MARGIN * _longest_trip(job, fragments))), inner_steps))


def _longest_trip(job: Job, fragments: int) -> float:
    return max(trip_steps(job, region, fragments) for region in job.regions)


def _atoll(job: Job, carried: Sequence[LinkLoad], inner_steps: int, overlap: float, utilisation: float) -> Method:
    # A process that dies loses its unsent work: up to H steps of each fragment.
    lost_s = job.repair_s + (inner_steps / 2 + overlap) * job.step_s
    lives = 1.0 if math.isinf(job.between_failures_s) else job.between_failures_s / (job.between_failures_s + lost_s)
    month_gb = sum(each.month_gb for each in carried)
    price = total(each.region.costs(each.month_gb) for each in carried)
    return Method("Atoll", utilisation, utilisation * lives, month_gb, price, job.step_s)
