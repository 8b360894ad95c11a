"""What simulations and plans say, as tables for people and as files for machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from atoll_server.forecast import paper
from atoll_server.forecast.claims import Claim
from atoll_server.forecast.job import Job, Method
from atoll_server.forecast.planner import Plan

FRONT_BYTES = 1792 << 20  # of a front, beside its cache: the process, and 64 uploads that pass
LEARNER_BYTES = 8 << 30  # of the host, beside Atoll's: torch, CUDA's libraries, and a loader
TRAINED_BYTES = 16  # of a learner on processors, for each parameter: itself, its gradient, and AdamW's two moments
REGIONS = ("eu", "us", "ap")  # of docker/compose.yaml
UNKNOWN = "-"
NAMES = {"dp": "data-parallel, not elastic", "elastic": "data-parallel, elastic"}


def goodput_table(ours: dict[str, list[float]], failures_per_year: float, difference: float) -> Table:
    """Ours beside the paper's, cell by cell, in %."""
    title = (
        f"Goodput in %, {failures_per_year:g} failures per chip and year: ours (paper's); RMSE {difference:.2f} points"
    )
    table = Table(title=title)
    table.add_column("")
    for chips in paper.CHIPS:
        table.add_column(f"{chips:,} chips", justify="right")
    for name, row in ours.items():
        cells = [f"{mine:.0f} ({theirs})" for mine, theirs in zip(row, paper.GOODPUT[name], strict=True)]
        table.add_row(NAMES.get(name, f"Decoupled, M = {name}"), *cells)
    return table


def claims_table(title: str, claims: Sequence[Claim]) -> Table:
    """A row for each figure."""
    table = Table(title=title)
    for column, side in (("", "left"), ("ours", "right"), ("paper", "right"), ("", "left"), ("of what", "left")):
        table.add_column(column, justify="right" if side == "right" else "left")
    for claim in claims:
        theirs = "" if claim.theirs is None else f"{claim.theirs:.3g}"
        table.add_row(claim.name, f"{claim.ours:.3g}", theirs, claim.unit, claim.how)
    return table


def claims_json(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [{"name": c.name, "ours": c.ours, "paper": c.theirs, "unit": c.unit, "of": c.how} for c in claims]


def plan_tables(job: Job, plan: Plan) -> list[Table]:
    """What to start, what links carry, what comes of it beside other ways, and what when a region is lost.

    Of a plan that does not work, what links had to carry.
    """
    if not plan.works:
        return [_links(plan)]
    tables = [_settings(job, plan), _links(plan), _methods([plan.atoll, *plan.others])]
    return [*tables, _losses(plan)] if plan.losses else tables


def plan_json(job: Job, plan: Plan) -> dict[str, Any]:
    """The same for machines; rates in bits a second, sizes in bytes."""
    return {
        "settings": {
            "inner_steps": plan.settings.inner_steps, "fragments": plan.settings.fragments,
            "overlap_steps": plan.settings.overlap_steps, "codec": plan.settings.codec.name.lower(), "shards": 1,
        },
        "core_bytes": plan.core_bytes, "disk_bytes": plan.disk_bytes, "learner_bytes": plan.learner_bytes,
        "links": [
            {"region": c.region.name, "up_bits_s": c.up_bits_s, "down_bits_s": c.down_bits_s, "share": c.share,
             "month_gb": c.month_gb, "month_price": c.region.costs(c.month_gb)}
            for c in plan.carried
        ],
        "core_link": {"in_bits_s": plan.core.up_bits_s, "out_bits_s": plan.core.down_bits_s, "share": plan.core.share},
        "methods": [
            {"name": m.name, "utilisation": m.utilisation, "goodput": m.goodput, "month_gb": m.month_gb,
             "month_price": m.month_price, "thousand_steps_gb": m.month_gb * m.thousand_steps}
            for m in (plan.atoll, *plan.others)
        ],
        "staleness": plan.staleness, "contributions": plan.contributions, "processors": _cores(job, plan),
        "warnings": list(plan.warnings), "works": plan.works,
        "losses": [{"region": lost.region, "pace": lost.pace, "silent_s": lost.silent_s} for lost in plan.losses],
    }  # fmt: skip


def helm_values(job: Job, plan: Plan) -> str:
    """For every region: `helm install atoll k8s/atoll -f k8s/atoll/values-home.yaml -f FILE`, and elsewhere -remote."""
    memory, disk = _gib(1.15 * plan.core_bytes), _gib(1.25 * plan.disk_bytes)
    cache = _cache_mib(job, plan)
    front, learner = _gib((cache << 20) + FRONT_BYTES), _gib(1.15 * plan.learner_bytes + LEARNER_BYTES)
    gigabytes, price = plan.atoll.month_gb, plan.atoll.month_price
    return "\n".join([
        f"# {job.parameters:.3g} parameters, {job.learners} learners, steps of {job.step_s:g} s: by `atoll plan`",
        "core:",
        "  settings:",
        f"    innerSteps: {plan.settings.inner_steps}",
        f"    fragments: {plan.settings.fragments}",
        f"    overlap: {plan.settings.overlap_steps:g}",
        f"    codec: {plan.settings.codec.name.lower()}",
        "    # totalTokens: of the whole run; outer steps cool down towards its end",
        f"  storage: {{size: {disk}Gi}}",
        "  resources:",
        f'    requests: {{cpu: "{_cores(job, plan)}", memory: {memory}Gi}}',
        f"    limits: {{memory: {memory}Gi}}",
        "front:",
        f"  cacheMib: {cache}",
        "  resources:",
        f'    requests: {{cpu: "1", memory: {front}Gi}}',
        f"    limits: {{memory: {front}Gi}}",
        "learner:  # beside what your loop takes of the host",
        "  resources:",
        f'    requests: {{cpu: "4", memory: {learner}Gi}}',
        f"    limits: {{memory: {learner}Gi}}",
        *([] if price is None else ["dashboard:", f"  pricePerGb: {price / gigabytes:.3g}"]),
        "",
    ])  # fmt: skip


def compose_override(job: Job, plan: Plan) -> str:
    """Beside docker/compose.yaml: `docker compose -f docker/compose.yaml -f FILE up`; learners without a GPU."""
    settings, cache = plan.settings, _cache_mib(job, plan)
    core = {
        "INNER_STEPS": settings.inner_steps, "FRAGMENTS": settings.fragments, "OVERLAP": f"{settings.overlap_steps:g}",
        "CODEC": settings.codec.name.lower(),
    }  # fmt: skip
    said = ", ".join(f'ATOLL_CORE_{name}: "{value}"' for name, value in core.items())
    learner = plan.learner_bytes + TRAINED_BYTES * job.parameters + (1 << 30)
    lines = ["services:", "  core:", f"    environment: {{{said}}}", f"    mem_limit: {_mib(1.15 * plan.core_bytes)}m"]
    for region in REGIONS:
        lines += [f"  front-{region}:", f'    environment: {{ATOLL_FRONT_CACHE_MIB: "{cache}"}}',
                  f"    mem_limit: {_mib((cache << 20) + FRONT_BYTES)}m",
                  f"  learner-{region}:", f"    mem_limit: {_mib(1.15 * learner)}m"]  # fmt: skip
    return "\n".join([*lines, ""])


def _cache_mib(job: Job, plan: Plan) -> int:
    """Of a front: an update of everything, and a whole fragment."""
    return max(48, round((0.4 + 4 / plan.settings.fragments) * job.parameters / 2**20))


def _cores(job: Job, plan: Plan) -> int:
    """Processors of the core: its seconds for each sync of the model (docs/data-plane.md), and one to spare."""
    each_s = (3.9e-9 + 1.7e-9 * job.learners) * job.parameters
    return 1 + max(1, -int(-each_s // (plan.settings.inner_steps * job.step_s)))


def _settings(job: Job, plan: Plan) -> Table:
    table = Table(title="What to start", show_header=False)
    rows = [
        ("inner steps between syncs", f"H = {plan.settings.inner_steps}", plan.why),
        ("fragments", f"P = {plan.settings.fragments}", "if the tensors allow it"),
        ("overlap", f"tau = {plan.settings.overlap_steps:g}", "steps that a round's way there and back may take"),
        ("codec", plan.settings.codec.name.lower(), f"{job.bits:g} bits a parameter, each way"),
        ("core", f"{_gib(plan.core_bytes)} GiB of memory, {_gib(plan.disk_bytes)} GiB of disk", "one: no shards yet"),
        ("", f"{_cores(job, plan)} processors", "merging, and one to spare"),
        ("each learner", f"{_gib(plan.learner_bytes)} GiB of host memory", "beside model and optimizer"),
        ("staleness", f"{plan.staleness:.2f} outer steps", "mean, by the fleet in virtual time"),
        ("merges", f"{plan.contributions:.0%} of those that live in each", "the others' work comes a round later"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _links(plan: Plan) -> Table:
    table = Table(title="Links to the core")
    for column in ("region", "learners", "up", "down", "of the link", "a month", "costs"):
        table.add_column(column, justify="left" if column == "region" else "right")
    for carried in (*plan.carried, plan.core):
        known = not math.isinf(carried.region.bits_s)
        price = plan.atoll.month_price if carried is plan.core else carried.region.costs(carried.month_gb)
        table.add_row(
            escape(carried.region.name), str(carried.region.learners), _rate(carried.up_bits_s),
            _rate(carried.down_bits_s), f"{carried.share:.0%}" if known else UNKNOWN, _volume(carried.month_gb),
            _price(price), end_section=carried is plan.carried[-1],
        )  # fmt: skip
    return table


def _methods(methods: Sequence[Method]) -> Table:
    table = Table(title="Beside other ways to train the same")
    for column in ("", "utilisation", "goodput", "a month", "costs", "1,000 steps", "cost"):
        table.add_column(column, justify="right" if column else "left")
    for method in methods:
        table.add_row(
            method.name, f"{method.utilisation:.1%}", f"{method.goodput:.1%}", _volume(method.month_gb),
            _price(method.month_price), _volume(method.month_gb * method.thousand_steps),
            _price(method.month_price, method.thousand_steps),
        )  # fmt: skip
    return table


def _losses(plan: Plan) -> Table:
    table = Table(title="When a region is lost")
    for column in ("region", "the others go on at", "rounds wait for it no longer after"):
        table.add_column(column, justify="right" if column != "region" else "left")
    for lost in plan.losses:
        table.add_row(escape(lost.region), f"{lost.pace:.0%} of the pace", f"{lost.silent_s:.3g} s")
    return table


def _gib(size: float) -> int:
    return max(1, -int(-size // 2**30))


def _mib(size: float) -> int:
    return -int(-size // 2**20)


def _rate(bits_s: float) -> str:
    return f"{bits_s / 1e9:.2f} Gbit/s" if bits_s >= 1e9 else f"{bits_s / 1e6:.1f} Mbit/s"


def _volume(gigabytes: float) -> str:
    if gigabytes >= 1000:
        return f"{gigabytes / 1000:,.1f} TB"
    return f"{gigabytes:,.1f} GB" if gigabytes >= 1 else f"{1000 * gigabytes:,.0f} MB"


def _price(whole: float | None, part: float = 1.0) -> str:
    if whole is None:
        return UNKNOWN
    return f"{whole * part:,.0f}" if whole * part >= 100 else f"{whole * part:,.2f}"
