"""Formats a plan as tables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from atoll_server.links.links import duration
from atoll_wire.cli.output import plain_table
from rich.markup import escape
from rich.table import Table

from atoll_forecast.planning.deployment import cpus, gib
from atoll_forecast.planning.job import Job, Method
from atoll_forecast.planning.planner import Plan

UNKNOWN = "-"


def plan_tables(job: Job, plan: Plan) -> list[Table]:
    """Returns the tables of settings, link load, other methods, and losses of regions.

    If the plan is infeasible, returns only the table of link load.
    """
    if not plan.works:
        return [_links(plan)]
    return [_settings(job, plan), _links(plan), _methods([plan.atoll, *plan.others]), _losses(plan)]


def plan_json(job: Job, plan: Plan) -> dict[str, Any]:
    """Returns the plan as JSON values. Rates are in bits per second, and sizes in bytes."""
    return {
        "settings": {
            "inner_steps": plan.settings.inner_steps,
            "fragments": plan.settings.fragments,
            "overlap_steps": plan.settings.overlap_steps,
            "codec": plan.settings.codec.name.lower(),
            "shards": plan.sharding.shards,
        },
        "shard_bytes": plan.sharding.memory_bytes,
        "shard_disk_bytes": plan.sharding.disk_bytes,
        "shard_backup_bytes": plan.sharding.backup_bytes,
        "core_bytes": plan.core_bytes,
        "disk_bytes": plan.disk_bytes,
        "learner_bytes": plan.learner_bytes,
        "links": [
            {
                "region": c.region.name,
                "up_bits_s": c.up_bits_s,
                "down_bits_s": c.down_bits_s,
                "share": c.share,
                "month_gb": c.month_gb,
                "month_price": c.region.costs(c.month_gb),
            }
            for c in plan.carried
        ],
        "core_link": {"in_bits_s": plan.core.up_bits_s, "out_bits_s": plan.core.down_bits_s, "share": plan.core.share},
        "methods": [
            {
                "name": m.name,
                "utilisation": m.utilisation,
                "goodput": m.goodput,
                "month_gb": m.month_gb,
                "month_price": m.month_price,
                "thousand_steps_gb": m.month_gb * m.thousand_steps,
            }
            for m in (plan.atoll, *plan.others)
        ],
        "staleness": plan.staleness,
        "contributions": plan.contributions,
        "processors": cpus(job, plan),
        "warnings": list(plan.warnings),
        "works": plan.works,
        "losses": [asdict(lost) for lost in plan.losses],
    }


def _settings(job: Job, plan: Plan) -> Table:
    table = plain_table(title="Settings", show_header=False)
    divided = plan.sharding
    one = divided.shards == 1
    why = "all fragments fit in one core" if one else f"{divided.share:.0%} of the parameters in the largest"
    rows = [
        ("inner steps between syncs", f"H = {plan.settings.inner_steps}", plan.why),
        ("fragments", f"P = {plan.settings.fragments}", "fewer if the model has too few tensors"),
        ("overlap", f"tau = {plan.settings.overlap_steps:g}", "inner steps that a sync may take"),
        ("codec", plan.settings.codec.name.lower(), f"{job.bits:g} bits per parameter, each way"),
        ("shards", f"{divided.shards}", why),
        (
            "core" if one else "each shard",
            f"{gib(divided.memory_bytes)} GiB of memory, {gib(divided.disk_bytes)} GiB of disk",
            "one core" if one else "one core per shard",
        ),
        ("", f"{cpus(job, plan)} CPUs", "for merges, plus one spare"),
        ("its backups", f"{gib(divided.backup_bytes)} GiB of disk", "the newest three, and one being written"),
        ("each learner", f"{gib(plan.learner_bytes)} GiB of host memory", "in addition to model and optimizer"),
        ("staleness", f"{plan.staleness:.2f} outer steps", "mean, from the trial in virtual time"),
        ("merges", f"{plan.contributions:.0%} of the live learners in each", "other contributions join the next round"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _links(plan: Plan) -> Table:
    table = plain_table(title="Links to the core")
    for column in ("region", "learners", "up", "down", "of link", "per month", "cost"):
        table.add_column(column, justify="left" if column == "region" else "right")
    for carried in (*plan.carried, plan.core):
        known = not math.isinf(carried.region.bits_s)
        price = plan.atoll.month_price if carried is plan.core else carried.region.costs(carried.month_gb)
        table.add_row(
            escape(carried.region.name),
            str(carried.region.learners),
            _rate(carried.up_bits_s),
            _rate(carried.down_bits_s),
            f"{carried.share:.0%}" if known else UNKNOWN,
            _volume(carried.month_gb),
            _price(price),
        )
    return table


def _methods(methods: Sequence[Method]) -> Table:
    table = plain_table(title="Comparison with other methods")
    for column in ("", "utilisation", "goodput", "per month", "cost", "1,000 steps", "cost"):
        table.add_column(column, justify="right" if column else "left")
    for method in methods:
        table.add_row(
            method.name,
            f"{method.utilisation:.1%}",
            f"{method.goodput:.1%}",
            _volume(method.month_gb),
            _price(method.month_price),
            _volume(method.month_gb * method.thousand_steps),
            _price(method.month_price, method.thousand_steps),
        )
    return table


def _losses(plan: Plan) -> Table:
    table = plain_table(title="Loss of a region")
    for column in ("region", "remaining learners", "rounds stop waiting after", "work is discarded after"):
        table.add_column(column, justify="right" if column != "region" else "left")
    for lost in plan.losses:
        table.add_row(escape(lost.region), f"{lost.pace:.0%}", f"{lost.silent_s:.3g} s", duration(lost.budget_s))
    return table


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
