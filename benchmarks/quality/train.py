"""Trains one run of the report by a recipe, and returns its record."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from atoll.reference import data
from atoll.reference.model import Transformer
from atoll.reference.train import inner_step, learning_rate, optimizer_for, validation_loss
from atoll_forecast.fleet.fleet import Fleet
from atoll_forecast.fleet.learners import LearnerSpec

from benchmarks.quality import base_model
from benchmarks.quality.policies import put_on
from benchmarks.quality.recipe import Recipe
from benchmarks.quality.training import CPU, Training, batches, new_model, tokens_of_step

WINDOWS = 2048  # windows of held-out text, for the final loss
CURVE_WINDOWS, CURVE_POINTS, STEPS_PER_POINT = 256, 10, 100  # a curve has few points if the run is short
MERGE_STEPS = 0.05  # duration of a merge, in steps


def train(recipe: Recipe, corpus: data.Corpus) -> dict[str, Any]:
    """Trains a recipe, and returns its record. loss: validation loss of the final published model, in nats per byte."""
    began = time.monotonic()
    torch.set_num_threads(1)
    result = data_parallel(recipe, corpus)[1] if recipe.method == "data-parallel" else fleet(recipe, corpus)
    if recipe.fine_tuning:
        result |= {"base": base_model.digest(recipe.base)}
    return {**result, "tokens": recipe.tokens, "wall_s": round(time.monotonic() - began, 1)}


def make_base(base: Recipe, corpus: data.Corpus) -> None:
    """Trains the base model of fine-tuning and keeps it, unless it exists. base: its recipe."""
    if not base_model.path_of(base).exists():
        base_model.keep(data_parallel(base, corpus)[0], base)


def data_parallel(recipe: Recipe, corpus: data.Corpus) -> tuple[Transformer, dict[str, Any]]:
    """Trains one model, and returns it with its record.

    Each step uses all learners' batches, so its gradient is the mean of theirs.
    """
    model = new_model(recipe)
    optimizer = optimizer_for(model, recipe.learning_rate)
    streams = [batches(recipe, corpus, name) for name in names(recipe)]
    curve, losses = [], []
    points = _points(recipe)
    for step in range(recipe.steps):
        rate = learning_rate(recipe.learning_rate, step / recipe.steps, step)
        losses.append(inner_step(model, optimizer, torch.cat([next(stream) for stream in streams]), rate, CPU))
        if points and (step + 1) % max(1, recipe.steps // points) == 0:
            curve.append((step + 1, validation_loss(model, corpus, CURVE_WINDOWS)))
    record = {"loss": validation_loss(model, corpus, WINDOWS), "curve": curve}
    return model, record | ({"train_loss": _last(losses)} if losses else {})


def fleet(recipe: Recipe, corpus: data.Corpus) -> dict[str, Any]:
    """Trains a fleet in virtual time. A virtual second is one step of a learner with speed 1."""
    settings = recipe.settings
    work = Training(recipe, settings, corpus)
    each = tokens_of_step(recipe)
    repair = {"between_failures_s": recipe.failures, "repair_s": recipe.repair} if recipe.failures else {}
    specs = [
        LearnerSpec(name, 1.0 / speed, each, delay_s=0.0 if recipe.method == "synchronous" else recipe.delay, **repair)
        for name, speed in zip(names(recipe), recipe.speeds or (1.0,) * recipe.learners, strict=True)
    ]
    merge_s, overlap = (0.0, 0.0) if recipe.method == "synchronous" else (MERGE_STEPS, math.inf)
    count, options = len(work.layout.fragments), {"seed": recipe.seed, "shards": recipe.shards}
    made = Fleet(settings, count, specs, work, merge_s=merge_s, overlap=overlap, **options)
    if recipe.policy:
        put_on(made, recipe.policy)
    curve: list[tuple[int, float]] = []
    points = _points(recipe)

    def until(fleet: Fleet) -> bool:
        if points and work.done >= (len(curve) + 1) / points:
            step = round(work.done * recipe.steps)
            curve.append((step, validation_loss(work.model(), corpus, CURVE_WINDOWS)))
        return fleet.tokens >= recipe.tokens

    made.run(until)
    staleness = [each for account in made.accounts.values() for each in account.staleness]
    return {
        "loss": validation_loss(work.model(), corpus, WINDOWS),
        "curve": curve,
        "train_loss": _last(work.losses),
        "settings": recipe.deciding_settings(),
        "merges": len(made.merges),
        "lapses": made.lapses,
        "merged": len(staleness),
        "causes": {cause: sum(m.cause == cause for m in made.merges) for cause in {m.cause for m in made.merges}},
        "shares": len(staleness) / max(1, len(made.merges)),
        "staleness": sum(staleness) / max(1, len(staleness)),
        "bits_up": work.bits[0] / work.bits[1],
        "bits_down": work.bits[2] / work.bits[3],
        "steps": {name: account.steps for name, account in made.accounts.items()},
        "blocked_s": sum(account.blocked_s for account in made.accounts.values()),
    }


def names(recipe: Recipe) -> list[str]:
    """Returns the names of the learners.

    All methods use the same names, because a learner's text depends on its name.
    """
    return [f"learner-{number}" for number in range(recipe.learners)]


def _points(recipe: Recipe) -> int:
    return min(CURVE_POINTS, recipe.steps // STEPS_PER_POINT)


def _last(losses: list[float]) -> float:
    """Returns the mean of the last twentieth of the losses."""
    part = losses[-max(1, len(losses) // 20) :]
    return sum(part) / len(part)
