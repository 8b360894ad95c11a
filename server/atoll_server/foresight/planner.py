"""PURE: settings for a run before it is begun, and what to expect of it: links, money, goodput, memory.

Sizes and times are simple sums of what was measured (docs/data-plane.md, records/); whether rounds keep up with the
links is not summed but tried: the fleet runs in virtual time with the real syncer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll_wire.layout import DEFAULT_FRAGMENTS

from atoll_server.foresight import bandwidth
from atoll_server.foresight.fleet import AT_ONCE, Fleet
from atoll_server.foresight.islands import Island
from atoll_server.foresight.schedule import Schedule
from atoll_server.members import LIVE_REPORTS, LIVE_STEPS
from atoll_server.settings import RunSettings

MONTH_S = 30 * 86_400.0
LINK_SHARE = 0.7  # of a link's rate that a plan may use: it carries other things too, and is not always at its best
LEAST_INNER_STEPS, MOST_INNER_STEPS = 24, 500  # below 24, rounds cost loss on the paper's scale; 500 is DiLoCo's
MOST_BLOCKED = 0.05  # of the learners' time, by step boundaries: H grows until they take less
BLOCKED_S = 1.3e-9  # of a step boundary, for each parameter taken and adopted (docs/data-plane.md: 162 ms for 124M)
MERGE_S = 3.2e-9  # of a core, for each parameter, and MERGE_EACH_S for each contribution to it
MERGE_EACH_S = 0.7e-9
ROUND_UP_BYTES, ROUND_DOWN_BYTES = 1200.0, 2800.0  # beside payloads: calls, heads, acknowledgements (records/wan)
CORE_BYTES, CORE_BASE = 12.4, 600 << 20  # of memory, for each parameter
DISK_BYTES, LEARNER_BYTES = (
    52.0,
    7.4,
)  # for each parameter: snapshots and the first parameters' file; in the host's memory
WAITING_BYTES = 0.5  # on disk, for each parameter, learner and outer step that a contribution may be late
SIMULATED = 12  # learners at most in the trial: more of a region behave like few
TRIAL_SYNCS = 8  # of every fragment
REPORT_S = 1.0  # between a learner's reports at most
LONGEST_STEP_S = 10.0  # of the trial: reports come once a second, whatever a step takes
MOST_MERGED = 0.9  # of the learners in each merge: fewer is worth a warning
MOST_CONTRIBUTIONS_S = 100.0  # to one core: more was never measured
LARGEST_CORE = 1 << 40


@dataclass(frozen=True, slots=True)
class Region:
    """One place with learners behind one link to the core. bits_s: each way. price_gb: of a gigabyte, either way."""

    name: str
    learners: int
    bits_s: float
    round_trip_s: float
    price_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained. step_s: an inner step of a learner. between_failures_s: of one learner, mean.

    repair_s: from its failure to its next step. bits: on the wire for each parameter, headers included.
    """

    parameters: float
    step_s: float
    regions: tuple[Region, ...]
    between_failures_s: float = math.inf
    repair_s: float = 600.0
    bits: float = bandwidth.CODED_BITS

    @property
    def learners(self) -> int:
        """In all regions."""
        return sum(region.learners for region in self.regions)


@dataclass(frozen=True, slots=True)
class Carried:
    """By one region's link, in bits a second: a contribution of each learner up, each update once down (by a front)."""

    region: Region
    up_bits_s: float
    down_bits_s: float

    @property
    def share(self) -> float:
        """Of the link's rate, in its busier way."""
        return max(self.up_bits_s, self.down_bits_s) / self.region.bits_s

    @property
    def month_gb(self) -> float:
        """Both ways."""
        return (self.up_bits_s + self.down_bits_s) / 8e9 * MONTH_S


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train this job. utilisation: of the learners' time, while nothing fails. goodput: with failures."""

    name: str
    utilisation: float
    goodput: float
    month_gb: float
    month_price: float


@dataclass(frozen=True, slots=True)
class Loss:
    """When a whole region is gone: what is left of the pace, and after how long rounds no longer wait for it."""

    region: str
    pace: float
    silent_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, and what will come of it. staleness: mean, in outer steps.

    why: these inner steps. contributions: in a merge, of all learners. works: if not, figures say nothing.
    """

    settings: RunSettings
    why: str
    carried: tuple[Carried, ...]
    atoll: Method
    others: tuple[Method, ...]
    staleness: float
    contributions: float
    core_bytes: float
    disk_bytes: float
    learner_bytes: float
    losses: tuple[Loss, ...]
    warnings: tuple[str, ...]
    works: bool


def plan(job: Job, fragments: int = 0) -> Plan:
    """The smallest H that links and step boundaries allow, the smallest tau that hides links. fragments: 0: 24."""
    count = fragments or DEFAULT_FRAGMENTS
    inner_steps, why = _inner_steps(job, count)
    overlap = _overlap(job, count, inner_steps)
    settings = RunSettings(inner_steps=inner_steps, fragments=count, overlap_steps=overlap)
    carried = tuple(_carried(job, region, count, inner_steps) for region in job.regions)
    silent_s = max(LIVE_STEPS * job.step_s, LIVE_REPORTS * REPORT_S)
    utilisation = 1 / (1 + _blocked(job) / inner_steps)
    trial = _trial(job, settings)
    return Plan(
        settings, why, carried, _atoll(job, carried, inner_steps, overlap, utilisation),
        (_data_parallel(job), _diloco(job)), trial.staleness, trial.contributions,
        CORE_BYTES * job.parameters + CORE_BASE,
        (DISK_BYTES + WAITING_BYTES * job.learners * settings.max_staleness) * job.parameters,
        LEARNER_BYTES * job.parameters,
        tuple(Loss(r.name, 1 - r.learners / job.learners, silent_s) for r in job.regions if len(job.regions) > 1),
        tuple(_warnings(job, carried, trial, settings, utilisation)),
        all(each.share <= 1 for each in carried) and trial.rounds >= MOST_MERGED,
    )  # fmt: skip


def _warnings(
    job: Job, carried: Sequence[Carried], trial: _Trial, settings: RunSettings, utilisation: float
) -> Iterator[str]:
    for each in carried:
        if each.share > LINK_SHARE:
            yield (
                f"{each.region.name}: {each.share:.0%} of its link with {MOST_INNER_STEPS} inner steps: leave it "
                "out, or have fewer learners there, longer steps, or a quicker link"
            )
    if trial.rounds < MOST_MERGED:
        yield f"only {trial.rounds:.0%} of the rounds come to a merge in time: this plan does not work"
    elif trial.contributions < MOST_MERGED:
        yield f"only {trial.contributions:.0%} of the learners are in each merge: a link is too slow for these steps"
    if settings.fragments > AT_ONCE * settings.inner_steps:
        yield f"more than {AT_ONCE} fragments a step: learners cannot answer all rounds in time; have fewer --fragments"
    if utilisation < 1 - 2 * MOST_BLOCKED:
        yield f"step boundaries take {1 - utilisation:.0%} of the learners' time: have longer steps, or smaller models"
    each_s = job.learners * settings.fragments / (settings.inner_steps * job.step_s)
    if each_s > MOST_CONTRIBUTIONS_S:
        yield f"{each_s:.0f} contributions a second: no core was measured with so many; have fewer --fragments"
    if CORE_BYTES * job.parameters > LARGEST_CORE:
        yield f"the core needs {CORE_BYTES * job.parameters / 2**40:.1f} TiB of memory: a run has one core for now"


def _carried(job: Job, region: Region, fragments: int, inner_steps: float) -> Carried:
    each = bandwidth.decoupled_bits_s(bandwidth.Model(job.parameters, job.step_s), inner_steps, job.bits)
    rounds_s = fragments / (inner_steps * job.step_s)
    up, down = each + 8 * ROUND_UP_BYTES * rounds_s, each + 8 * ROUND_DOWN_BYTES * rounds_s
    return Carried(region, region.learners * up, down)


def _blocked(job: Job) -> float:
    """Step boundaries, for a whole model, in steps."""
    return BLOCKED_S * job.parameters / job.step_s


def _inner_steps(job: Job, fragments: int) -> tuple[int, str]:
    links = max(_carried(job, region, fragments, 1).share for region in job.regions) / LINK_SHARE  # for a whole model
    needed, why = max(
        (LEAST_INNER_STEPS, "as many as the paper has"),
        (math.ceil(links), "the fewest that the links carry"),
        (math.ceil(_blocked(job) / MOST_BLOCKED), f"the fewest with which step boundaries take {MOST_BLOCKED:.0%}"),
    )
    return min(MOST_INNER_STEPS, needed), why if needed <= MOST_INNER_STEPS else "as many as DiLoCo has; see below"


def trip_steps(job: Job, region: Region, fragments: int) -> float:
    """From a round's opening to its adoption, in steps: half a step until a boundary, twice, and the way both ways."""
    size_bits = job.bits * job.parameters / fragments
    carried_s = size_bits * (region.learners + 1) / region.bits_s
    merge_s = job.parameters / fragments * (MERGE_S + MERGE_EACH_S * job.learners)
    return 1.0 + (carried_s + 2 * region.round_trip_s + merge_s) / job.step_s


def _overlap(job: Job, fragments: int, inner_steps: int) -> float:
    needed = max(trip_steps(job, region, fragments) for region in job.regions)
    least: float = RunSettings().overlap_steps
    return float(min(max(least, math.ceil(1.25 * needed)), inner_steps))


def _atoll(job: Job, carried: Sequence[Carried], inner_steps: int, overlap: float, utilisation: float) -> Method:
    # A process that dies takes along what it had not sent: of each fragment between nothing and H steps.
    lost_s = job.repair_s + (inner_steps / 2 + overlap) * job.step_s
    lives = 1.0 if math.isinf(job.between_failures_s) else job.between_failures_s / (job.between_failures_s + lost_s)
    month_gb = sum(each.month_gb for each in carried)
    price = sum(each.month_gb * each.region.price_gb for each in carried)
    return Method("Atoll", utilisation, utilisation * lives, month_gb, price)


def _data_parallel(job: Job) -> Method:
    """Gradients in bfloat16, reduced within a region first; all wait for the slowest link, and for whoever fails."""
    slowest = min(job.regions, key=lambda region: region.bits_s)
    trip_s = max(region.round_trip_s for region in job.regions)
    model = bandwidth.Model(job.parameters, job.step_s)
    step_s = job.step_s if len(job.regions) == 1 else bandwidth.data_parallel_step_s(
        model, slowest.bits_s, len(job.regions), round_trip_s=trip_s
    )  # fmt: skip
    payload = bandwidth.exchange_factor(len(job.regions)) * job.parameters * bandwidth.BF16_BITS
    return _together("data-parallel", job, job.step_s / step_s, 2 * payload / step_s)


def _diloco(job: Job) -> Method:
    """As published first: every 500 inner steps everybody waits while the whole model is exchanged in float32."""
    inner_steps = MOST_INNER_STEPS
    slowest = min(region.bits_s for region in job.regions)
    payload = bandwidth.exchange_factor(len(job.regions)) * job.parameters * 32
    cycle_s = inner_steps * job.step_s + payload / slowest + max(region.round_trip_s for region in job.regions)
    return _together(f"DiLoCo, H = {inner_steps}", job, inner_steps * job.step_s / cycle_s, 2 * payload / cycle_s)


def _together(name: str, job: Job, utilisation: float, bits_s: float) -> Method:
    """A job that stands as one when any learner fails; failures while it stands cost nothing more."""
    lives = 1.0
    if not math.isinf(job.between_failures_s):
        each_s = job.between_failures_s / job.learners
        lives = each_s / (each_s + job.repair_s)
    region_gb = bits_s / 8e9 * MONTH_S
    price = sum(region_gb * region.price_gb for region in job.regions)
    return Method(name, utilisation, utilisation * lives, region_gb * len(job.regions), price)


@dataclass(frozen=True, slots=True)
class _Trial:
    """contributions: of a merge, as a share of all learners. rounds: merged, as a share of those that were due."""

    staleness: float
    contributions: float
    rounds: float


def _trial(job: Job, settings: RunSettings) -> _Trial:
    """By the fleet, without failures."""
    shrink, quick = max(1.0, job.learners / SIMULATED), max(1.0, job.step_s / LONGEST_STEP_S)
    step_s = job.step_s / quick  # and all else with it
    islands = []
    for region in job.regions:
        count = max(1, round(region.learners / shrink))
        islands += [
            Island(
                f"{region.name}-{number:03}", step_s, jitter=0.05, up_bits_s=quick * region.bits_s / region.learners,
                down_bits_s=quick * region.bits_s, delay_s=region.round_trip_s / 2 / quick,
            )
            for number in range(count)
        ]  # fmt: skip
    fragments = settings.fragments
    sizes = [job.bits / 8 * job.parameters / fragments] * fragments
    work = Schedule(sizes, {island.name: 1 for island in islands})
    merge_s = job.parameters / fragments * (MERGE_S + MERGE_EACH_S * job.learners) / quick
    fleet = Fleet(settings, fragments, islands, work, merge_s=merge_s)
    until_s = TRIAL_SYNCS * settings.inner_steps * step_s
    in_time = 0

    def until(fleet: Fleet) -> bool:
        nonlocal in_time
        if fleet.now < until_s:
            in_time = len(fleet.merges)
        return fleet.now >= until_s

    fleet.run(until)
    shares = [share for merge in fleet.merges[:in_time] for share in merge.shares]  # what comes when all leave is less
    staleness = sum(share.staleness for share in shares) / max(1, len(shares))
    return _Trial(staleness, len(shares) / max(1, in_time) / len(islands), in_time / (TRIAL_SYNCS * fragments))
