"""Which runs the report is made of: groups of variants, each with three seeds, all beside one baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.quality.recipe import Recipe

SEEDS = (0, 1, 2)
MIXED = (0.5, 0.8, 1.2, 1.5)
RATES = {"outer_lr": 0.7, "outer_momentum": 0.7, "outer_warm_up": 25}
DATA_PARALLEL = Recipe("data-parallel", learning_rate=1.5e-2)
SYNCHRONOUS = Recipe("synchronous", learning_rate=6e-3)
DECOUPLED = Recipe("decoupled", learning_rate=6e-3)


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


def run(base: Recipe, **settings: Any) -> Recipe:  # noqa: ANN401
    """A recipe with other settings of the run than it had."""
    return replace(base, run=tuple(sorted((dict(base.run) | settings).items())))


BASE = run(DECOUPLED, **RATES)

BARE = run(replace(BASE, speeds=MIXED), quorum="1", grace_ratio=0.0)

COST = Group("cost", "What decoupling and coding cost", (
    Variant("synchronous DiLoCo, float32", run(SYNCHRONOUS, **RATES)),
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
    Variant("equal speeds", BASE),
    Variant("K = M", run(replace(BASE, speeds=MIXED), quorum="100%")),
    Variant("K = half, grace (default)", replace(BASE, speeds=MIXED)),
    Variant("K = 1, grace", run(replace(BASE, speeds=MIXED), quorum="1")),
    Variant("K = 1, no grace", BARE),
    Variant("K = 1, no grace, weights of all live learners", replace(BARE, policy="weights-of-all")),
))  # fmt: skip
GROUPS = (COST, LEARNERS, SPEEDS)
