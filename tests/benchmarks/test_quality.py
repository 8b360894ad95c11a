"""The quality report's runs are deterministic, use the product's merge, and apply each setting."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest
from atoll.reference import data
from atoll_server.settings import RunSettings
from rich.console import Console

from benchmarks.quality import grid, records, report
from benchmarks.quality import recipe as recipe_room
from benchmarks.quality.over_grpc import through_processes
from benchmarks.quality.recipe import Recipe
from benchmarks.quality.records import Records
from benchmarks.quality.train import train

SMALL = Recipe("decoupled", size="40k", steps=40, batch=8, learners=2, learning_rate=6e-3)


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
    whole = data.load(None, 64)
    return data.Corpus(whole.training[:200_000], whole.validation[:20_000], whole.sha256)


def loss(recipe: Recipe, corpus: data.Corpus) -> float:
    return train(recipe, corpus)["loss"]


def there(recipe: Recipe, loss: float) -> dict:
    """Returns the record that a run with today's settings would write."""
    settings = recipe.deciding_settings()
    return {"loss": loss} if settings is None else {"loss": loss, "settings": settings}


@pytest.fixture(scope="module")
def base(corpus) -> dict:
    return train(SMALL, corpus)


def test_a_run_learns_and_is_repeatable(base, corpus):
    again = train(SMALL, corpus)
    assert {k: v for k, v in again.items() if k != "wall_s"} == {k: v for k, v in base.items() if k != "wall_s"}
    assert base["loss"] < 4.5  # an untrained model has 5.55
    assert base["shares"] > 1.9
    assert base["bits_up"] < 4


@pytest.mark.ci
@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"merging": "average"},
        {"adoption": "overwrite"},
        {"down": "float32"},
        {"method": "synchronous"},
        {"method": "data-parallel"},
        {"run": (("outer_lr", 0.3),)},
        {"run": (("codec", "float32"),)},
        {"run": (("inner_steps", 6),)},
        {"speeds": (0.5, 1.5)},
        {"failures": 10.0, "repair": 2.0},
        {"run": (("outer_warm_up", 0),)},
    ],
    ids=str,
)
def test_each_setting_changes_the_result(base, corpus, change):
    assert loss(replace(SMALL, **change), corpus) != base["loss"]


def test_without_a_grace_window_policies_decide_when_late_work_is_merged(corpus):
    eager = replace(SMALL, speeds=(0.5, 1.5), run=(("grace_ratio", 0.0), ("quorum", "1")))
    at_once, waiting, papers = (
        train(replace(eager, policy=policy), corpus)
        for policy in ("", "late-waits", "late-waits+weights-of-those-here")
    )
    assert at_once["causes"]["late"] > 0
    assert at_once["merges"] > waiting["merges"] == papers["merges"]
    assert "late" not in waiting["causes"].keys() | papers["causes"].keys()
    assert len({at_once["loss"], waiting["loss"], papers["loss"]}) == 3


@pytest.mark.ci
def test_processes_over_grpc_give_the_results_of_virtual_time():
    recipe = replace(SMALL, steps=100)
    made = through_processes(recipe, 0.03)
    virtual = train(recipe, data.load(None, recipe.model.context))
    assert [each["refused"] for each in made["learners"]] == [0, 0]
    assert made["loss"] == pytest.approx(virtual["loss"], rel=0.15)  # the order of joining still matters


def test_one_learner_with_plain_outer_steps_is_plain_training(corpus):
    """With outer learning rate 1 and no momentum, the outer step equals the learner's own work."""
    run = (("codec", "float32"), ("outer_lr", 1.0), ("outer_momentum", 0.0))
    alone = replace(SMALL, method="synchronous", learners=1, batch=4, run=run)
    plain = replace(SMALL, method="data-parallel", learners=1, batch=4)
    assert loss(alone, corpus) == pytest.approx(loss(plain, corpus), rel=0.02)  # differs by one step and rounding


@pytest.mark.ci
def test_a_record_is_made_once_and_appears_in_a_table(tmp_path, monkeypatch):
    variants = tuple(
        grid.Variant(name, replace(SMALL, steps=8, run=(("outer_lr", lr),))) for name, lr in (("a", 0.7), ("b", 0.9))
    )
    monkeypatch.setattr(grid, "SEEDS", (0, 1))
    monkeypatch.setattr(records, "commit", lambda: "this tree")
    group = grid.Group("g", "A group", "A finding", variants)
    wanted = [recipe for variant in variants for recipe in variant.seeds()]
    runs = Records.load(tmp_path / "runs")
    for recipe in wanted[:3]:
        runs.add(recipe, there(recipe, 2.0 + 0.1 * recipe.seed) | {"commit": "an old one"})
    records.make(wanted, 1, Console(quiet=True), runs)
    runs = Records.load(tmp_path / "runs")
    assert [runs.read(recipe)["commit"] for recipe in wanted] == [*["an old one"] * 3, "this tree"]
    made = runs.read(wanted[3])
    assert made["recipe"]["seed"] == 1
    assert made["corpus"] == records.CORPUS
    first, second = report.lines(group, runs)
    assert first.behind == [0.0, 0.0]
    assert second.behind[0] == 0.0
    assert second.behind[1] == pytest.approx(100 * (made["loss"] / 2.1 - 1))
    assert "| b |" in report.table(group, [first, second])
    assert "| an old one, this tree |" in report.table(group, [first, second])


def test_a_changed_default_makes_its_records_outdated(tmp_path, monkeypatch):
    runs = Records.load(tmp_path)
    stated = replace(SMALL, run=(("outer_lr", RunSettings().outer_lr),))
    for recipe in (SMALL, stated):
        runs.add(recipe, there(recipe, 2.0))
    monkeypatch.setattr(recipe_room, "RunSettings", lambda: RunSettings(outer_lr=0.123))
    assert runs.read(SMALL) is None
    assert runs.read(stated) is not None, "a stated value must not follow the default"
    runs.add(SMALL, there(SMALL, 3.0))
    assert [Records.load(tmp_path).read(each)["loss"] for each in (SMALL, stated)] == [3.0, 2.0]


def test_a_changed_default_of_storage_keeps_records_valid(tmp_path, monkeypatch):
    runs = Records.load(tmp_path)
    runs.add(SMALL, there(SMALL, 2.0))
    monkeypatch.setattr(recipe_room, "RunSettings", lambda: RunSettings(record=True, keep_snapshots=9))
    assert runs.read(SMALL) is not None


def test_each_committed_run_is_in_the_file_of_its_series():
    for path in records.RUNS.glob("*.json"):
        runs = json.loads(path.read_text())
        labels = [run["run"] for run in runs]
        assert labels == sorted(set(labels)), path.name
        for run in runs:
            recipe = records.recipe_of(run)
            assert (grid.series(recipe), recipe.label()) == (path.stem, run["run"])


def test_uncommitted_code_makes_no_record(tmp_path, monkeypatch):
    for words in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    code = tmp_path / "server" / "merge.py"
    code.parent.mkdir()
    code.write_text("a = 1\n")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "commit", "-q", "-m", "m"], cwd=tmp_path, check=True)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    records.make([], 1, Console(quiet=True), Records.load(tmp_path))
    code.write_text("a = 2\n")
    with pytest.raises(records.RecordError, match=r"server/merge\.py has uncommitted changes"):
        records.make([], 1, Console(quiet=True), Records.load(tmp_path))


def test_a_budget_compares_the_best_of_each_side(tmp_path):
    budget = grid.Budget("40k", 24, (1e-2, 2e-2), ((3e-3, 0.7, 0.7), (6e-3, 0.7, 0.8)))
    plain, fleets = budget.sides()
    runs = Records.load(tmp_path)
    assert report.gaps([budget], runs) == []
    for recipe, loss in zip([*plain, *fleets], (2.0, 2.1, 2.6, 2.2), strict=True):
        runs.add(recipe, there(recipe, loss))
    (gap,) = report.gaps([budget], runs)
    assert gap.behind == pytest.approx([10.0])
    assert gap.fleet.settings.outer_momentum == 0.8
    assert "| 2.2000 (0.006; 0.7, 0.8) | +10.00 % | 1 | 2, 2 |" in report.budget_table([gap])
    for recipe, loss in ((gap.data_parallel, 2.0), (gap.fleet, 2.4)):
        runs.add(replace(recipe, seed=2), there(recipe, loss))
    (gap,) = report.gaps([budget], runs)
    assert gap.behind == pytest.approx([10.0, 20.0]), "learning rates are chosen on the first seed"
    assert "| +15.00 ± 5.00 % | 2 | 2, 2 |" in report.budget_table([gap])
    said = report.headline(gap)
    assert "loss was 2.3000, vs. 2.0000 for data-parallel training: +15.00 ± 5.00 % (2 seeds, " in said
    assert {recipe.tokens for recipe in (*plain, *fleets)} == {24 * 32 * 64}


def test_all_rows_of_a_table_are_different_runs():
    for group in grid.GROUPS:
        recipes = [variant.recipe for variant in group.variants]
        assert len(set(recipes)) == len(recipes), group.name


def test_recipes_have_different_labels():
    recipes = {recipe for group in grid.GROUPS for variant in group.variants for recipe in variant.seeds()}
    recipes |= {recipe for budget in grid.BUDGETS for side in budget.sides() for recipe in side}
    assert len({recipe.label() for recipe in recipes}) == len(recipes)
