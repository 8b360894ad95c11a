"""The runs of the report: groups of variants with a baseline, and budgets compared with data-parallel training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atoll_server.settings import RunSettings

from benchmarks.quality.recipe import Recipe

SEEDS = (0, 1, 2)
REST = "budgets"  # the series of runs that no table of variants contains
FINE_TUNING = "presets"  # the series of runs that begin with a base model
MIXED = (0.5, 0.8, 1.2, 1.5)
DATA_PARALLEL = Recipe("data-parallel", learning_rate=1e-2)
BASE = Recipe("decoupled", learning_rate=6e-3)


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of a table. recipe: the recipe with seed 0."""

    name: str
    recipe: Recipe

    def seeds(self) -> list[Recipe]:
        """Returns the recipe with each seed."""
        return [replace(self.recipe, seed=seed) for seed in SEEDS]


@dataclass(frozen=True, slots=True)
class Group:
    """A table, and a plot with the title `finding`. All variants are compared with the first one, seed by seed."""

    name: str
    title: str
    finding: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """Data-parallel and decoupled training of one model size and number of steps.

    Each uses the rates that are best with the first seed.
    data_parallel: inner rates to try. fleets: (inner rate, outer rate, momentum) to try.
    """

    size: str
    steps: int
    data_parallel: tuple[float, ...]
    fleets: tuple[tuple[float, float, float], ...]

    def sides(self) -> tuple[list[Recipe], list[Recipe]]:
        """Returns the recipes of data-parallel and of decoupled training, for all rates to try."""
        plain = [replace(DATA_PARALLEL, size=self.size, steps=self.steps, learning_rate=r) for r in self.data_parallel]
        fleets = [
            run(replace(BASE, size=self.size, steps=self.steps, learning_rate=r), outer_lr=lr, outer_momentum=mu)
            for r, lr, mu in self.fleets
        ]
        return plain, fleets


def run(base: Recipe, **settings: Any) -> Recipe:  # noqa: ANN401
    """Returns a recipe with changed run settings. Omits settings that have their default values."""
    usual = RunSettings().model_dump()
    usual.pop("total_tokens")  # a recipe has its own number of tokens
    given = {n: value for n, value in (dict(base.run) | settings).items() if n not in usual or value != usual[n]}
    return replace(base, run=tuple(sorted(given.items())))


def average(base: Recipe, **settings: Any) -> Recipe:  # noqa: ANN401
    """Returns the result of `run`, with merges by plain averages."""
    return replace(run(base, **settings), merging="average")


EAGER = run(replace(BASE, speeds=MIXED), quorum="1", grace_ratio=0.0)

COST = Group(
    "cost",
    "The cost of decoupling and coding",
    "Decoupled training with int4 is level with synchronous float32 DiLoCo",
    (
        Variant("synchronous DiLoCo, float32", replace(BASE, method="synchronous")),
        Variant("Decoupled, float32", run(BASE, codec="float32")),
        Variant("Decoupled, int4 up, float32 down", replace(BASE, down="float32")),
        Variant("Decoupled, int4 both ways", BASE),
        Variant("the same over 4 shards", replace(BASE, shards=4)),
        Variant("one shard, with failures", replace(BASE, failures=400.0, repair=20.0)),
    ),
)
LEARNERS = Group(
    "learners",
    "Number of learners, equal tokens",
    "More learners raise the loss after 42 outer steps",
    (
        Variant("data-parallel", DATA_PARALLEL),
        *(Variant(f"M = {count}", replace(BASE, learners=count)) for count in (2, 4, 8)),
        Variant("M = 2, inner rate 9e-3", replace(BASE, learners=2, learning_rate=9e-3)),
        Variant("M = 8, inner rate 4e-3", replace(BASE, learners=8, learning_rate=4e-3)),
    ),
)
SPEEDS = Group(
    "speeds",
    "Speeds of 0.5, 0.8, 1.2, 1.5",
    "A small quorum raises the loss only without a grace window",
    (
        Variant("K = M", run(replace(BASE, speeds=MIXED), quorum="100%")),
        Variant("K = half, grace (default)", replace(BASE, speeds=MIXED)),
        Variant("K = 1, grace", run(replace(BASE, speeds=MIXED), quorum="1")),
        Variant("K = 1, no grace", EAGER),
        Variant("the same, staleness exponent 0", run(EAGER, staleness_exponent=0.0)),
        Variant("the same, staleness exponent 1", run(EAGER, staleness_exponent=1.0)),
        Variant("K = 1, no grace, late work waits for a round", replace(EAGER, policy="late-waits")),
        Variant(
            "the same, weights relative to the merged work (the paper's)",
            replace(EAGER, policy="late-waits+weights-of-those-here"),
        ),
    ),
)
OUTER = Group(
    "outer",
    "Outer rate, momentum, merging and adoption",
    "Growing momentum and merging by direction lower the loss",
    (
        Variant("0.5, 0.85 (default)", BASE),
        Variant("full momentum from the start", run(BASE, outer_warm_up=0)),
        Variant("no cool-down (no --total-tokens)", run(BASE, total_tokens=0)),
        Variant("cool-down over 0.3 of the tokens", run(BASE, outer_cool_down=0.3)),
        Variant("0.4, 0.9", run(BASE, outer_lr=0.4, outer_momentum=0.9)),
        Variant("0.7, 0.7", run(BASE, outer_lr=0.7, outer_momentum=0.7)),
        Variant("0.7, 0.9: DiLoCo's", run(BASE, outer_lr=0.7, outer_momentum=0.9)),
        Variant("0.8, 0.8", run(BASE, outer_lr=0.8, outer_momentum=0.8)),
        Variant("1, none: plain averages of the learners' parameters", average(BASE, outer_lr=1.0, outer_momentum=0.0)),
        Variant("merged by averaging, 0.5, 0.85", average(BASE)),
        Variant("merged by averaging, 1, 0.7", average(BASE, outer_lr=1.0, outer_momentum=0.7)),
        Variant("adoption overwrites outstanding work", replace(BASE, adoption="overwrite")),
    ),
)
INTERVAL = Group(
    "interval",
    "H and the overlap",
    "After 1,000 steps H = 12 is best, and an overlap of 2 steps is too short",
    (
        Variant("H = 24, overlap 4 (default)", BASE),
        Variant("H = 12", run(BASE, inner_steps=12)),
        Variant("H = 6", run(BASE, inner_steps=6)),
        Variant("H = 12, inner rate 9e-3", run(replace(BASE, learning_rate=9e-3), inner_steps=12)),
        Variant("H = 12, 0.7, 0.4", run(BASE, inner_steps=12, outer_lr=0.7, outer_momentum=0.4)),
        Variant("H = 48", run(BASE, inner_steps=48)),
        Variant("H = 96", run(BASE, inner_steps=96)),
        Variant("overlap 2", run(BASE, overlap_steps=2.0)),
        Variant("overlap 8", run(BASE, overlap_steps=8.0)),
    ),
)
LONGER = replace(BASE, steps=3000, learning_rate=4e-3)
LONGEST = replace(BASE, steps=10000, learning_rate=2e-3)
GROUPS = (
    COST,
    LEARNERS,
    Group(
        "learners-3000",
        "Number of learners, equal tokens, 3,000 steps",
        "More learners raise the loss less after 125 outer steps",
        (
            Variant("data-parallel", replace(DATA_PARALLEL, steps=3000, learning_rate=6e-3)),
            *(Variant(f"M = {count}", replace(LONGER, learners=count)) for count in (2, 4, 8)),
        ),
    ),
    SPEEDS,
    OUTER,
    INTERVAL,
    Group(
        "interval-3000",
        "H over 3,000 steps",
        "After 3,000 steps H = 12 is no better than H = 24",
        (
            Variant("H = 24 (default)", LONGER),
            Variant("H = 12", run(LONGER, inner_steps=12)),
            Variant("H = 12, inner rate 6e-3", run(replace(LONGER, learning_rate=6e-3), inner_steps=12)),
            Variant("H = 6", run(LONGER, inner_steps=6)),
        ),
    ),
    Group(
        "interval-10000",
        "H over 10,000 steps",
        "After 10,000 steps H from 12 to 96 changes the loss by less than 1 %",
        (
            Variant("H = 24 (default)", LONGEST),
            *(Variant(f"H = {steps}", run(LONGEST, inner_steps=steps)) for steps in (12, 48, 96)),
        ),
    ),
)
A, B = (0.5, 0.85), (0.7, 0.7)
# On both sides, the best inner rate falls with the number of steps.
BUDGETS = (
    Budget("40k", 1000, (1e-2, 1.5e-2, 2e-2, 3e-2), ((6e-3, *A), (9e-3, *A), (1.3e-2, *A))),
    Budget("40k", 3000, (1e-2, 1.5e-2, 2e-2), ((4e-3, *A), (6e-3, *A), (9e-3, *A))),
    Budget("40k", 10000, (6e-3, 1e-2, 1.5e-2), ((2e-3, *A), (3e-3, *A), (4e-3, *A))),
    Budget("180k", 300, (1e-2, 1.5e-2, 2e-2), ((6e-3, *B), (1e-2, *A), (1e-2, *B), (1.5e-2, *B))),
    Budget("180k", 1000, (6e-3, 1e-2, 1.5e-2, 2e-2), ((4e-3, *B), (6e-3, *A), (6e-3, *B), (9e-3, *A))),
    Budget(
        "180k",
        3000,
        (4e-3, 6e-3, 1e-2, 1.5e-2),
        (
            (3e-3, *A),
            (3e-3, *B),
            (4e-3, *A),
            (4e-3, *B),
            (6e-3, *A),
            (6e-3, *B),
        ),
    ),
    Budget("180k", 10000, (1.5e-3, 2.5e-3, 4e-3, 6e-3), ((2e-3, *A), (2e-3, *B), (3e-3, *A), (3e-3, *B))),
    Budget("490k", 1000, (4e-3, 6e-3, 1e-2), ((4e-3, *A), (6e-3, *A), (9e-3, *A))),
    Budget("490k", 3000, (2.5e-3, 4e-3, 6e-3), ((2e-3, *A), (3e-3, *A), (4e-3, *A))),
)


def series(recipe: Recipe) -> str:
    """Returns the file name for a recipe's record: that of the first table with the recipe, with any seed."""
    if recipe.fine_tuning:
        return FINE_TUNING
    first = replace(recipe, seed=0)
    holding = (group.name for group in GROUPS if any(variant.recipe == first for variant in group.variants))
    return next(holding, REST)
