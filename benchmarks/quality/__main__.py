"""`make quality`: trains runs without a record, then writes the report's tables and plots. ARGS="--only cost"."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.quality import plots
from benchmarks.quality.grid import BUDGETS, GROUPS, SEEDS
from benchmarks.quality.records import RECORDS, Records, make
from benchmarks.quality.report import budget_table, gaps, lines, table

REPORT = RECORDS / "README.md"


def main() -> None:
    """Trains missing runs, unless --report is given, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=[*(group.name for group in GROUPS), "budgets"], help="only these groups"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds per variant, at most")
    parser.add_argument("--workers", type=int, default=2, help="parallel runs, of one thread each")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    chosen = [group for group in GROUPS if not options.only or group.name in options.only]
    console = Console(width=200)
    records = Records.load()
    if not options.report:
        # First seeds first: a whole report with one seed is worth more than half a report with three.
        wanted = [v.seeds()[seed] for seed in range(options.seeds) for group in chosen for v in group.variants]
        budgets = BUDGETS if not options.only or "budgets" in options.only else ()
        wanted += [recipe for budget in budgets for side in budget.sides() for recipe in side]
        make(wanted, options.workers, console, records)
        best = [recipe for gap in gaps(budgets, records) for recipe in (gap.data_parallel, gap.fleet)]
        if best:
            further = [replace(recipe, seed=seed) for seed in SEEDS[: options.seeds] for recipe in best]
            make(further, options.workers, console, records)
    write(REPORT, records)
    console.print(f"wrote {REPORT}")


def write(path: Path, records: Records) -> None:
    """Writes the report: a table and a plot per group. path: of the Markdown file."""
    parts = [HEAD]
    for group in GROUPS:
        found = lines(group, records)
        if len(found) > 1:
            plots.losses(group, found, path.with_name(f"{group.name}.svg"))
            parts += [table(group, found), f"![{group.title}]({group.name}.svg)\n"]
    compared = gaps(BUDGETS, records)
    if compared:
        plots.gaps(compared, path.with_name("budgets.svg"))
        parts += [
            BUDGETS_HEAD,
            budget_table(compared),
            "![The gap over tokens, and over tokens per parameter](budgets.svg)\n",
        ]
    path.write_text("\n".join(parts))


HEAD = """# Quality: what the records say

Made by `make quality` from [runs](runs): a file for each table below, with the runs that no earlier table has, and
[budgets.json](runs/budgets.json) with what only the budgets have. Each run has its settings and the commit that made
it. Validation loss in nats a byte, of the published model after everybody has left; lower is better. Mean over seeds
and its standard error; "beside" compares seed by seed: the same first parameters, and, where learners, speeds and
failures are the same, the same text in the same order. Mixed speeds have more outer steps for their tokens: rounds
follow the fastest.

A record's `curve` is over 256 windows of held-out text, its `loss` over 2,048. [over-grpc.json](over-grpc.json) has a
core and learners in processes of their own beside virtual time (`python -m benchmarks.quality.over_grpc`).

[explored.json](explored.json) has the runs from which settings were chosen: one seed each, made while harness and
product grew, not to be compared with the tables but among themselves. Until 2026-11-22 learners of H = 6 and 12 and
outer rates of 0.9 and 0.5 answered one round a step. Their policies are gone, or became Atoll's: "discounted" is how
merges are weighted now, "landing" and "ending:PART:1:1" are today's end of a run (plain means when nobody is left,
and a cool-down over that part of the tokens); "late-at-once" and "late-together" merge what is late when it comes, or
when all of a round has, "parts" lets momentum fade by work instead of merges, "beyond-one" discounts only what is more
than an outer step late; "exact" is the loss of the core's own parameters beside the published ones.
"""

BUDGETS_HEAD = """### What is left to data-parallel, by budget

Four learners, H = 24, int4 both ways, equal tokens; each side at the best of the rates that were tried with the first
seed, and beside each other seed by seed.
"""


if __name__ == "__main__":
    main()
