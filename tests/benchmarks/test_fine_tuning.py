"""Fine-tuning in the quality report: adapters, the base model, and the comparison behind the presets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from atoll.model.parameters import Parameters
from atoll.reference import data
from atoll.reference.model import build
from atoll.reference.train import inner_step, optimizer_for, validation_loss
from torch import nn

from benchmarks.quality import base_model, grid, lora, presets
from benchmarks.quality.recipe import Recipe
from benchmarks.quality.records import Records
from benchmarks.quality.train import train
from benchmarks.quality.training import CPU, Training, new_model

TUNED = Recipe("decoupled", size="40k", steps=30, batch=8, learners=2, learning_rate=1e-2, fine_tuning="lora")
WINDOW = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def corpus() -> data.Corpus:
    whole = data.load(None, 64)
    return data.Corpus(whole.training[:200_000], whole.validation[:20_000], whole.sha256)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Returns the parameters of a base model, which stays in its own folder."""
    monkeypatch.setattr(base_model, "FOLDER", tmp_path)
    model = build(TUNED.model, 3)
    base_model.keep(model, TUNED.base)
    return model.state_dict()


def test_only_adapters_are_trained_and_sent(base):
    model = new_model(TUNED)
    optimizer = optimizer_for(model, 1e-2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):  # in the first step, the gradient of `down` is zero, because `up` is zero
        inner_step(model, optimizer, WINDOW, 1e-2, CPU)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    adapters = {name for name in before if name.endswith((".up", ".down"))}
    linear = sum(isinstance(layer, nn.Linear) for layer in build(TUNED.model, 3).blocks.modules())
    assert changed == adapters
    assert len(adapters) == 2 * linear
    assert {tensor.name for tensor in Parameters(model, optimizer).tensors} == adapters


def test_an_adapted_model_begins_as_its_base_and_is_exported_as_base_plus_adapters(base):
    model = new_model(TUNED)
    plain = build(TUNED.model, 0)
    plain.load_state_dict(base)
    assert torch.equal(model(WINDOW[:, :-1]), plain(WINDOW[:, :-1]))
    optimizer = optimizer_for(model, 1e-2)
    for _ in range(3):
        inner_step(model, optimizer, WINDOW, 1e-2, CPU)
    assert not torch.allclose(model(WINDOW[:, :-1]), plain(WINDOW[:, :-1]), atol=1e-2)
    state = lora.export(model)
    layer = model.blocks[0].up
    expected = base["blocks.0.up.weight"] + lora.SCALE * layer.up @ layer.down
    assert torch.allclose(state["blocks.0.up.weight"], expected)
    assert torch.equal(state["head.weight"], base["head.weight"])
    plain.load_state_dict(state, strict=True)
    assert torch.allclose(model(WINDOW[:, :-1]), plain(WINDOW[:, :-1]), atol=1e-5)


@pytest.mark.ci
def test_a_fleet_trains_adapters_and_does_not_change_the_base(base, corpus):
    record = train(TUNED, corpus)
    plain = build(TUNED.model, 0)
    plain.load_state_dict(base)
    assert record["loss"] < validation_loss(plain, corpus, 2048) - 0.1
    assert record["base"] == base_model.digest(TUNED.base)
    work = Training(TUNED, TUNED.settings, corpus)
    trained = sum(layer.up.numel() + layer.down.numel() for layer in _adapted(new_model(TUNED)))
    assert sum(fragment.length for fragment in work.layout.fragments) == trained
    others = {replace(TUNED, fine_tuning="all"), replace(TUNED, seed=1)}
    assert len({train(each, corpus)["loss"] for each in others} | {record["loss"]}) == 3


def _adapted(model: nn.Module) -> list[lora.LowRank]:
    return [layer for layer in model.modules() if isinstance(layer, lora.LowRank)]


def test_the_untuned_model_is_the_base_itself(base, corpus):
    plain = build(TUNED.model, 0)
    plain.load_state_dict(base)
    assert train(presets.UNTUNED, corpus)["loss"] == validation_loss(plain, corpus, 2048)


def test_a_method_is_compared_at_the_rate_that_was_best_on_the_first_seed(tmp_path):
    records = Records(tmp_path, {})

    def add(recipe: Recipe, loss: float) -> None:
        settings = recipe.deciding_settings()
        records.add(recipe, {"loss": loss} | ({} if settings is None else {"settings": settings}))

    one, other = (presets.Cell("lora", 50, method) for method in (presets.ONE_PROCESS, presets.DEFAULT))
    for cell, losses in ((one, (2.0, 2.1, 2.2, 2.3)), (other, (2.5, 2.4, 2.2, 2.3))):
        for recipe, loss in zip(cell.tries(), losses, strict=True):
            add(recipe, loss)
    best = [cell.best(records) for cell in (one, other)]
    assert [recipe.learning_rate for recipe in best] == [presets.RATES["lora"][0], presets.RATES["lora"][2]]
    for recipe, loss in zip(best, (2.0, 2.4), strict=True):
        add(replace(recipe, seed=1), loss)
    assert other.behind(records) == pytest.approx([10.0, 20.0])
    assert "2.3000 ± 0.1000 (0.024, 2 seeds) | +15.00 ± 5.00 %" in presets.table(records)
    assert not presets.curves("lora", records), "a plot must have only methods with all seeds"
    for recipe, loss in zip(best, (2.0, 2.3), strict=True):
        add(replace(recipe, seed=2), loss)
    assert presets.curves("lora", records) == [(presets.DEFAULT, [50], [pytest.approx(15.0)])]
    assert [path.name for path in tmp_path.iterdir()] == [f"{grid.FINE_TUNING}.json"]


def test_recipes_of_the_comparison_have_different_labels():
    recipes = {
        recipe
        for kind in presets.KINDS
        for steps in presets.STEPS
        for cell in presets.cells(kind, steps)
        for recipe in cell.tries()
    }
    assert len({recipe.label() for recipe in recipes}) == len(recipes)
    assert len(recipes) == len(presets.STEPS) * len(presets.METHODS) * sum(map(len, presets.RATES.values()))
