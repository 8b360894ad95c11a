"""The comparison behind the presets: ways to fine-tune a base model, vs. one process on the same tokens."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.quality.grid import SEEDS, run
from benchmarks.quality.recipe import Recipe
from benchmarks.quality.records import Records
from benchmarks.quality.report import NOTHING, best, spread

TITLE = "Presets: settings for fine-tuning"
FINDING = "Fine-tuning: H = 12 lowers the loss in all four comparisons with the default, H = 24"
ONE_PROCESS = "one process, data-parallel"
DEFAULT = "0.5, 0.85 (default)"
KINDS: dict[Literal["all", "lora"], str] = {"all": "all parameters", "lora": "LoRA adapters, rank 8"}
STEPS = (50, 150, 400)  # per learner
RATES = {"all": (3e-3, 6e-3, 1.2e-2, 2.4e-2), "lora": (6e-3, 1.2e-2, 2.4e-2, 4.8e-2)}
FLEET = Recipe("decoupled", size="40k", batch=16)
UNTUNED = Recipe("data-parallel", size="40k", batch=16, steps=0, fine_tuning="all")  # its loss is the base model's
METHODS = {
    ONE_PROCESS: Recipe("data-parallel", size="40k", batch=16),
    DEFAULT: FLEET,
    "0.5, none": run(FLEET, outer_momentum=0.0),
    "1, none": run(FLEET, outer_lr=1.0, outer_momentum=0.0),
    "0.7, 0.5": run(FLEET, outer_lr=0.7, outer_momentum=0.5),
    "0.7, 0.9, no warm-up: DiLoCo's": run(FLEET, outer_lr=0.7, outer_momentum=0.9, outer_warm_up=0),
    "0.5, 0.85, H = 12": run(FLEET, inner_steps=12),
    "0.5, 0.85, H = 6": run(FLEET, inner_steps=6),
    "1, none, H = 6": run(FLEET, inner_steps=6, outer_lr=1.0, outer_momentum=0.0),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One method with one budget, at the inner rate that is best with the first seed. steps: per learner."""

    kind: Literal["all", "lora"]
    steps: int
    method: str

    def tries(self) -> list[Recipe]:
        """Returns the recipes with the first seed, one per inner rate."""
        recipe = replace(METHODS[self.method], fine_tuning=self.kind, steps=self.steps, seed=SEEDS[0])
        return [replace(recipe, learning_rate=rate) for rate in RATES[self.kind]]

    def best(self, records: Records) -> Recipe | None:
        """Returns the recipe with the best inner rate, or None without records."""
        return best(self.tries(), records)

    def losses(self, records: Records) -> dict[int, float]:
        """Returns the loss for each seed that has a record, at the best inner rate."""
        chosen = self.best(records)
        found = {seed: records.read(replace(chosen, seed=seed)) for seed in SEEDS} if chosen else {}
        return {seed: record["loss"] for seed, record in found.items() if record is not None}

    def behind(self, records: Records) -> list[float]:
        """Returns the percentage by which the loss exceeds that of one process, for each seed that both have."""
        one = replace(self, method=ONE_PROCESS).losses(records)
        return [100 * (loss / one[seed] - 1) for seed, loss in self.losses(records).items() if seed in one]


def cells(kind: Literal["all", "lora"], steps: int) -> list[Cell]:
    """Returns the cells of one kind of fine-tuning and one budget, one per method."""
    return [Cell(kind, steps, method) for method in METHODS]


def table(records: Records) -> str:
    """Returns the comparison as one Markdown table per kind of fine-tuning."""
    return "\n".join(_table(kind, records) for kind in KINDS)


def _table(kind: Literal["all", "lora"], records: Records) -> str:
    heads = "".join(f" {steps} steps (inner rate) | vs. one process |" for steps in STEPS)
    rows = [f"**{KINDS[kind]}**", "", f"| outer rate, momentum |{heads}", "|---|" + "---|---|" * len(STEPS)]
    for method in METHODS:
        texts = [text for steps in STEPS for text in _texts(Cell(kind, steps, method), records)]
        rows.append(f"| {method} | {' | '.join(texts)} |")
    return "\n".join([*rows, ""])


def _texts(cell: Cell, records: Records) -> tuple[str, str]:
    chosen, losses, behind = cell.best(records), list(cell.losses(records).values()), cell.behind(records)
    if chosen is None:
        return NOTHING, NOTHING
    seeds = "" if len(losses) == len(SEEDS) else f", {len(losses)} seed" + "s" * (len(losses) > 1)
    return f"{spread(losses, '.4f')} ({chosen.learning_rate:g}{seeds})", f"{spread(behind, '+.2f')} %"


def curves(kind: Literal["all", "lora"], records: Records) -> list[tuple[str, list[int], list[float]]]:
    """Returns a method's name, budgets and mean percentages above one process, for each method with all seeds."""
    found = []
    for method in METHODS:
        of = [(steps, Cell(kind, steps, method).behind(records)) for steps in STEPS]
        there = [(steps, statistics.mean(behind)) for steps, behind in of if len(behind) == len(SEEDS)]
        if there and method != ONE_PROCESS:
            found.append((method, [steps for steps, _ in there], [mean for _, mean in there]))
    return found
