"""Which runs the report is made of: groups of variants beside a baseline, and budgets beside data-parallel training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.quality.recipe import Recipe

SEEDS = (0, 1, 2)
MIXED = (0.5, 0.8, 1.2, 1.5)
DATA_PARALLEL = Recipe("data-parallel", learning_rate=1.5e-2)
BASE = Recipe("decoupled", learning_rate=6e-3)


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of a table. recipe: of seed 0."""

    name: str
    recipe: Recipe

    def seeds(self) -> list[Recipe]:
        """One recipe for each seed."""
        return [replace(self.recipe, seed=seed) for seed in SEEDS]


@dataclass(frozen=True, slots=True)
class Group:
    """A table. The first variant is what the others are compared with, seed by seed."""

    name: str
    title: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """Both sides at one size and number of steps, each at the best of the rates that were tried; one seed.

    data_parallel: inner rates. fleets: inner rate, outer rate and momentum.
    """

    size: str
    steps: int
    data_parallel: tuple[float, ...]
    fleets: tuple[tuple[float, float, float], ...]

    def sides(self) -> tuple[list[Recipe], list[Recipe]]:
        """Data-parallel and decoupled."""
        plain = [replace(DATA_PARALLEL, size=self.size, steps=self.steps, learning_rate=r) for r in self.data_parallel]
        fleets = [
            run(replace(BASE, size=self.size, steps=self.steps, learning_rate=r), outer_lr=lr, outer_momentum=mu)
            for r, lr, mu in self.fleets
        ]
        return plain, fleets


def run(base: Recipe, **settings: Any) -> Recipe:  # noqa: ANN401
    """A recipe with other settings of the run than it had."""
    return replace(base, run=tuple(sorted((dict(base.run) | settings).items())))


def average(base: Recipe, **settings: Any) -> Recipe:  # noqa: ANN401
    """The same, merged by plain averages."""
    return replace(run(base, **settings), merging="average")


EAGER = run(replace(BASE, speeds=MIXED), quorum="1", grace_ratio=0.0)

COST = Group("cost", "What decoupling and coding cost", (
    Variant("synchronous DiLoCo, float32", replace(BASE, method="synchronous")),
    Variant("Decoupled, float32", run(BASE, codec="float32")),
    Variant("Decoupled, int4 up, float32 down", replace(BASE, down="float32")),
    Variant("Decoupled, int4 both ways", BASE),
    Variant("the same with failures", replace(BASE, failures=400.0, repair=20.0)),
))  # fmt: skip
LEARNERS = Group("learners", "Number of learners, equal tokens", (
    Variant("data-parallel", DATA_PARALLEL),
    *(Variant(f"M = {count}", replace(BASE, learners=count)) for count in (2, 4, 8)),
))  # fmt: skip
SPEEDS = Group("speeds", "Speeds of 0.5, 0.8, 1.2, 1.5", (
    Variant("K = M", run(replace(BASE, speeds=MIXED), quorum="100%")),
    Variant("K = half, grace (default)", replace(BASE, speeds=MIXED)),
    Variant("K = 1, grace", run(replace(BASE, speeds=MIXED), quorum="1")),
    Variant("K = 1, no grace", EAGER),
    Variant("K = 1, no grace, staleness exponent 0", run(EAGER, staleness_exponent=0.0)),
    Variant("K = 1, no grace, staleness exponent 1", run(EAGER, staleness_exponent=1.0)),
    Variant("K = 1, no grace, outer rate 0.5", run(EAGER, outer_lr=0.5)),
    Variant("K = 1, no grace, momentum 0.5", run(EAGER, outer_momentum=0.5)),
    Variant("K = 1, no grace, weights of those here", replace(EAGER, policy="weights-of-those-here")),
))  # fmt: skip
OUTER = Group("outer", "Outer rate, momentum, merging and adoption", (
    Variant("0.7, 0.7 (default)", BASE),
    Variant("the momentum at once", run(BASE, outer_warm_up=0)),
    Variant("no cool-down: the core was not told of an end", run(BASE, total_tokens=0)),
    Variant("cool-down over 0.3 of the tokens", run(BASE, outer_cool_down=0.3)),
    Variant("0.7, 0.8", run(BASE, outer_momentum=0.8)),
    Variant("0.7, 0.9", run(BASE, outer_momentum=0.9)),
    Variant("0.9, 0.5", run(BASE, outer_lr=0.9, outer_momentum=0.5)),
    Variant("1, none: plain averages of what learners have", average(BASE, outer_lr=1.0, outer_momentum=0.0)),
    Variant("merged by averages, 0.7, 0.7", average(BASE)),
    Variant("merged by averages, 1, 0.5", average(BASE, outer_lr=1.0, outer_momentum=0.5)),
    Variant("overwriting what was trained meanwhile", replace(BASE, adoption="overwrite")),
))  # fmt: skip
INTERVAL = Group("interval", "H and the overlap", (
    Variant("H = 24, overlap 4 (default)", BASE),
    Variant("H = 12", run(BASE, inner_steps=12)),
    Variant("H = 12, momentum 0.4", run(BASE, inner_steps=12, outer_momentum=0.4)),
    Variant("H = 48", run(BASE, inner_steps=48)),
    Variant("H = 96", run(BASE, inner_steps=96)),
    Variant("overlap 2", run(BASE, overlap_steps=2.0)),
    Variant("overlap 8", run(BASE, overlap_steps=8.0)),
))  # fmt: skip
GROUPS = (COST, LEARNERS, SPEEDS, OUTER, INTERVAL)
# The inner rate that is best falls with the number of steps, on both sides.
BUDGETS = (
    Budget("40k", 1000, (1e-2, 1.5e-2, 2e-2), ((6e-3, 0.7, 0.7), (9e-3, 0.7, 0.7))),
    Budget("40k", 3000, (1e-2, 1.5e-2), ((4e-3, 0.7, 0.7), (6e-3, 0.7, 0.7))),
    Budget("40k", 10000, (6e-3, 1e-2), ((3e-3, 0.7, 0.7), (4e-3, 0.7, 0.7))),
    Budget("180k", 300, (1.5e-2, 2e-2), ((6e-3, 0.7, 0.7), (1e-2, 0.7, 0.7))),
    Budget("180k", 1000, (1e-2, 1.5e-2, 2e-2), ((4e-3, 0.7, 0.7), (6e-3, 0.7, 0.7), (9e-3, 0.7, 0.7))),
    Budget("180k", 3000, (4e-3, 6e-3, 1e-2, 1.5e-2), ((3e-3, 0.7, 0.7), (4e-3, 0.7, 0.7), (6e-3, 0.7, 0.7))),
    Budget("180k", 10000, (4e-3, 6e-3), ((2e-3, 0.7, 0.7), (3e-3, 0.7, 0.7), (4e-3, 0.7, 0.7))),
    Budget("490k", 1000, (6e-3, 1e-2), ((4e-3, 0.7, 0.7), (6e-3, 0.7, 0.7))),
    Budget("490k", 3000, (4e-3, 6e-3), ((3e-3, 0.7, 0.7), (4e-3, 0.7, 0.7))),
)
