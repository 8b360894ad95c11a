"""Tables of the records: mean and spread over seeds, and each variant vs. the first, seed by seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.quality.grid import SEEDS, Budget, Group, Variant
from benchmarks.quality.recipe import Recipe
from benchmarks.quality.records import Records

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Line:
    """One variant. behind: percent above the group's first variant, for each seed that both have."""

    variant: Variant
    records: list[dict[str, Any]]
    behind: list[float]

    @property
    def losses(self) -> list[float]:
        """The loss of each seed that has a record."""
        return [record["loss"] for record in self.records]


@dataclass(frozen=True, slots=True)
class Gap:
    """One budget, with each side at the rates that are best with the first seed.

    losses: (data-parallel, decoupled) for each seed that both have. tried: number of recipes of each side.
    """

    budget: Budget
    data_parallel: Recipe
    fleet: Recipe
    losses: list[tuple[float, float]]
    tried: tuple[int, int]

    @property
    def behind(self) -> list[float]:
        """The percentage by which the loss of decoupled training exceeds data-parallel, for each seed."""
        return [100 * (other / one - 1) for one, other in self.losses]


def best(recipes: Sequence[Recipe], records: Records) -> Recipe | None:
    """Returns the recipe with the lowest loss among those that have a record, or None if none has."""
    found = [(recipe, record["loss"]) for recipe in recipes if (record := records.read(recipe)) is not None]
    return min(found, key=lambda each: each[1], default=(None, 0.0))[0]


def gaps(budgets: Sequence[Budget], records: Records) -> list[Gap]:
    """Returns the gaps of all budgets that have records of both sides."""
    found = []
    for budget in budgets:
        plain, fleets = budget.sides()
        one, other = best(plain, records), best(fleets, records)
        if one is not None and other is not None:
            there = [sum(records.read(r) is not None for r in side) for side in (plain, fleets)]
            pairs = [[records.read(replace(recipe, seed=seed)) for recipe in (one, other)] for seed in SEEDS]
            losses = [(a["loss"], b["loss"]) for a, b in pairs if a is not None and b is not None]
            found.append(Gap(budget, one, other, losses, (there[0], there[1])))
    return found


def budget_table(found: Sequence[Gap]) -> str:
    """Returns the gaps of all budgets as a Markdown table."""
    rows = [
        "| size | tokens | outer steps | data-parallel (rate) | Decoupled (rate; outer) | gap | seeds | rates tried |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for gap in found:
        plain = gap.data_parallel
        fleet = gap.fleet
        settings = gap.fleet.settings
        one, other = ([pair[side] for pair in gap.losses] for side in (0, 1))
        cells = [
            gap.budget.size,
            f"{fleet.tokens / 1e6:.1f}M",
            f"{fleet.steps / settings.inner_steps:.0f}",
            f"{spread(one, '.4f')} ({plain.learning_rate:g})",
            f"{spread(other, '.4f')} ({fleet.learning_rate:g}; {settings.outer_lr:g}, {settings.outer_momentum:g})",
            f"{spread(gap.behind, '+.2f')} %",
            str(len(gap.losses)),
            f"{gap.tried[0]}, {gap.tried[1]}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def headline(gap: Gap) -> str:
    """The gap of one budget as a sentence with its setup."""
    one, other = (statistics.mean(pair[side] for pair in gap.losses) for side in (0, 1))
    fleet = gap.fleet
    count, steps = len(gap.losses), fleet.steps / fleet.settings.inner_steps
    return (
        f"With {fleet.tokens / 1e6:.1f}M tokens and {gap.budget.size} parameters, four learners' loss was {other:.4f}, "
        f"vs. {one:.4f} for data-parallel training: {spread(gap.behind, '+.2f')} % "
        f"({count} seed{'s' * (count > 1)}, {steps:.0f} outer steps)."
    )


def lines(group: Group, records: Records) -> list[Line]:
    """Returns one line per variant that has a record."""
    first = {recipe.seed: records.read(recipe) for recipe in group.variants[0].seeds()}
    found = []
    for variant in group.variants:
        mine = {recipe.seed: records.read(recipe) for recipe in variant.seeds()}
        behind = [
            100 * (record["loss"] / base["loss"] - 1)
            for seed, record in mine.items()
            if record is not None and (base := first[seed]) is not None
        ]
        there = [record for record in mine.values() if record is not None]
        if there:
            found.append(Line(variant, there, behind))
    return found


def table(group: Group, found: Sequence[Line]) -> str:
    """Returns a group's lines as a Markdown table with a heading."""
    base = group.variants[0].name
    rows = [
        f"### {group.title}",
        "",
        f"| | loss | seeds | vs. {base} | contributions per merge | staleness | bits up, down | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*rows, *map(_row, found), ""])


def _row(line: Line) -> str:
    behind = f"{spread(line.behind, '+.2f')} %" if line.behind else NOTHING
    cells = [
        line.variant.name,
        spread(line.losses, ".4f"),
        str(len(line.losses)),
        behind,
        _mean(line, "shares", ".2f"),
        _mean(line, "staleness", ".2f"),
        f"{_mean(line, 'bits_up', '.2f')}, {_mean(line, 'bits_down', '.2f')}",
        ", ".join(sorted({record["commit"] for record in line.records})),
    ]
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], form: str) -> str:
    """Returns the mean, and its standard error if there are several values. form: the figures' format."""
    if not values:
        return NOTHING
    mean = format(statistics.mean(values), form)
    if len(values) < 2:
        return mean
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{mean} ± {format(error, form.removeprefix('+'))}"


def _mean(line: Line, name: str, form: str) -> str:
    values = [record[name] for record in line.records if name in record]
    return format(statistics.mean(values), form) if values else NOTHING
