"""`make quality`: trains runs without a record, then writes the report's tables and plots. ARGS="--only cost"."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.quality import plots, presets
from benchmarks.quality.grid import BUDGETS, FINE_TUNING, GROUPS, REST, SEEDS
from benchmarks.quality.records import RECORDS, Records, make
from benchmarks.quality.report import best, budget_table, gaps, headline, lines, table

REPORT = RECORDS / "README.md"


def main() -> None:
    """Trains missing runs, unless --report is given, and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        choices=[*(group.name for group in GROUPS), REST, FINE_TUNING],
        help="group to train; you may repeat this option",
    )
    parser.add_argument("--seeds", type=int, default=3, help="largest number of seeds per variant")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel runs, each with one thread")
    parser.add_argument("--report", action="store_true", help="write the report without training")
    options = parser.parse_args()

    def wants(name: str) -> bool:
        return not options.only or name in options.only

    console = Console(width=200)
    records = Records.load()
    if not options.report:
        # First seeds first, because a whole report with one seed is worth more than half a report with three.
        wanted = [
            v.seeds()[seed]
            for seed in range(options.seeds)
            for group in GROUPS
            if wants(group.name)
            for v in group.variants
        ]
        make(wanted, options.workers, console, records)
        stages = [[side for budget in BUDGETS for side in budget.sides()]] if wants(REST) else []
        if wants(FINE_TUNING):
            make([presets.UNTUNED], 1, console, records)
            stages += [
                [cell.tries() for cell in presets.cells(kind, n)] for n in presets.STEPS for kind in presets.KINDS
            ]
        for stage in stages:
            make([recipe for tries in stage for recipe in tries], options.workers, console, records)
            chosen = [found for tries in stage if (found := best(tries, records)) is not None]
            further = [replace(recipe, seed=seed) for seed in SEEDS[: options.seeds] for recipe in chosen]
            make(further, options.workers, console, records)
    write(REPORT, records)
    console.print(f"wrote {REPORT}")


def write(path: Path, records: Records) -> None:
    """Writes the report: a table and a plot per group. path: the Markdown file."""
    compared = gaps(BUDGETS, records)
    cited = {(gap.budget.size, gap.budget.steps): headline(gap) for gap in compared}
    parts = [TITLE, *(cited[budget] for budget in CITED if budget in cited), HEAD]
    for group in GROUPS:
        found = lines(group, records)
        if len(found) > 1:
            plots.losses(group, found, path.with_name(f"{group.name}.svg"))
            parts += [table(group, found), f"![{group.title}]({group.name}.svg)\n"]
    if compared:
        plots.gaps(compared, path.with_name("budgets.svg"))
        parts += [
            BUDGETS_HEAD,
            budget_table(compared),
            "![The gap over tokens, and over tokens per parameter](budgets.svg)\n",
        ]
    if untuned := records.read(presets.UNTUNED):
        plots.presets(records, path.with_name("presets.svg"))
        said = f"The base model's loss is {untuned['loss']:.4f}.\n"
        parts += [PRESETS_HEAD, said, presets.table(records), f"![{presets.FINDING}](presets.svg)\n"]
    path.write_text("\n".join(parts))


CITED = (("180k", 3000), ("180k", 1000))  # the README cites the gaps of these budgets: size, inner steps

TITLE = "# Quality records\n"

HEAD = """
`make quality` writes this report. The folder `runs` has a file for each table, with the runs that no earlier table
uses. [budgets.json](runs/budgets.json) has the runs that only the table of budgets uses. Each run includes its settings
and its commit.

Loss is the published model's validation loss in nats per byte, after all learners have left. Each cell has the mean
over seeds and its standard error. Comparisons pair the runs by seed: both runs start from the same parameters. If their
learners, speeds and failures are the same, both also read the same text in the same order. With mixed speeds, a run
takes more outer steps per token, because rounds follow the fastest learner.

A run's `curve` is measured on 256 windows of held-out text, and its `loss` on 2,048 windows.
[over-grpc.json](over-grpc.json) compares runs in separate processes with runs in virtual time
(`python -m benchmarks.quality.over_grpc`).

[explored.json](explored.json) has the runs that led to the default settings. Nine configurations have two or three
seeds, the others one. The code changed between these runs, so small differences mean nothing. Until 2026-11-22,
learners with H = 6 and 12, and learners with outer rates of 0.9 and 0.5, answered one round per step. Later versions
adopted or dropped these policies:

- `discounted` is today's weighting of merges.
- `landing` and `ending:PART:1:1` are today's end of a run. It consists of a cool-down over the given part of the
  tokens, and of plain means after all learners have left.
- `late-at-once` merges late work when it arrives. `late-together` merges it after the whole round has arrived.
- `parts` lets the momentum decay by merged work instead of by merges.
- `beyond-one` discounts only work that is more than one outer step late.
- `exact` is the loss of the core's exact parameters, not of the published parameters.
"""

BUDGETS_HEAD = """### The gap to data-parallel training, by budget

Four learners use H = 24, int4 in both directions, and as many tokens as data-parallel training. Each side uses the best
inner rate that was tried with the first seed. Comparisons pair the runs by seed.
"""

PRESETS_HEAD = f"""### {presets.TITLE}

The base model has 40k parameters, and was trained with one process for 1,000 steps on the usual text. Each run
fine-tunes it on the standard library's tests (`Lib/test`), with the first 8 MB of files. Four learners use batches of
4 x 64 tokens each. One process uses the four batches in one step, so all methods read the same text. Each method uses
the best inner rate that was tried with the first seed. The percentages pair the runs by seed. Learners with momentum
use the warm-up of 25 outer steps, unless a row says otherwise. H is 24 unless a row says otherwise. A dash means that
no run was made.
"""


if __name__ == "__main__":
    main()
