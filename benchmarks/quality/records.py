"""Records of runs, with one file per series under records/quality/runs. The report reads these records."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from atoll.reference import data
from atoll_wire.errors import UserError
from rich.console import Console

from benchmarks.quality.grid import series
from benchmarks.quality.recipe import Recipe
from benchmarks.quality.train import make_base, train

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "records" / "quality"
RUNS = RECORDS / "runs"
CODE = ("benchmarks/quality", "forecast", "learner", "proto", "server")  # code that decides a run's result
CORPUS = "d0f9a46ea1d4e01baac005c25f40b819bb2380e31d7d50587308a1934f499789"  # CPython 3.11.7's own library
TESTS = "720f6c952347263ee2d6d688daca8463db83d77d07955506977d9948b63a1066"  # its tests, for fine-tuning


class RecordError(UserError):
    """A run's record would not be reproducible, or not comparable with the other records."""


class Records:
    """The records of a folder, one per recipe. A file has a series: a JSON list of objects, one field per line."""

    def __init__(self, folder: Path, runs: dict[Recipe, dict[str, Any]]) -> None:
        self._folder = folder
        self._runs = runs

    @classmethod
    def load(cls, folder: Path = RUNS) -> Records:
        """Reads all series in a folder. A missing folder has no records."""
        found = [run for path in sorted(folder.glob("*.json")) for run in json.loads(path.read_text())]
        return cls(folder, {recipe_of(run): run for run in found})

    def read(self, recipe: Recipe) -> dict[str, Any] | None:
        """Returns the record of a run, or None if there is none or Atoll's defaults have changed since."""
        run = self._runs.get(recipe)
        return run if run is not None and run.get("settings") == recipe.deciding_settings() else None

    def add(self, recipe: Recipe, result: dict[str, Any]) -> None:
        """Adds a record, which replaces an older one of the same recipe, and rewrites the file of its series."""
        self._runs[recipe] = {"run": recipe.label(), "recipe": asdict(recipe), **result}
        path = self._folder / f"{series(recipe)}.json"
        mine = [run for each, run in self._runs.items() if series(each) == series(recipe)]
        part = path.with_suffix(".part")
        self._folder.mkdir(parents=True, exist_ok=True)
        part.write_text(_text(sorted(mine, key=lambda run: run["run"])))
        part.rename(path)


def recipe_of(run: dict[str, Any]) -> Recipe:
    """Returns the recipe of a record."""
    return Recipe(**{name: _tuples(value) for name, value in run["recipe"].items()})


def _tuples(value: Any) -> Any:  # noqa: ANN401 - JSON has lists where a recipe has tuples
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _text(runs: Sequence[dict[str, Any]]) -> str:
    """Returns records as JSON, with one field per line."""
    fields = (",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in run.items()) for run in runs)
    return "[\n" + ",\n".join(f"{{\n{each}\n}}" for each in fields) + "\n]\n"


def make(recipes: Sequence[Recipe], workers: int, console: Console, records: Records) -> None:
    """Trains recipes without a record, `workers` at a time, and writes each record when its run is done.

    Raises RecordError if the text differs from that of the other records, or if the code has uncommitted changes.
    """
    missing = [recipe for recipe in dict.fromkeys(recipes) if records.read(recipe) is None]
    console.print(f"{len(set(recipes)) - len(missing)} of {len(set(recipes))} records exist")
    of, began = commit(), time.monotonic()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for base in {recipe.base for recipe in missing if recipe.fine_tuning}:
            pool.submit(_make_base, base).result()
        running = {pool.submit(_run, recipe): recipe for recipe in missing}
        for number, done in enumerate(as_completed(running), start=1):
            recipe, result = running[done], done.result()
            records.add(recipe, {"commit": of, **result})
            left_s = (time.monotonic() - began) * (len(missing) / number - 1)
            console.print(f"{number}/{len(missing)}, {left_s / 60:.0f} min left: {result['loss']:.4f} {recipe.label()}")


def _run(recipe: Recipe) -> dict[str, Any]:
    corpus = _text_of(recipe)
    return {"corpus": corpus.sha256, **train(recipe, corpus)}


def _make_base(base: Recipe) -> None:
    make_base(base, _text_of(base))


def _text_of(recipe: Recipe) -> data.Corpus:
    corpus = data.load(recipe.text, recipe.model.context)
    used = TESTS if recipe.fine_tuning else CORPUS
    if corpus.sha256 != used:
        raise RecordError(
            f"this Python's standard library has SHA-256 {corpus.sha256[:12]}, but the records used {used[:12]}: "
            "use CPython 3.11.7"
        )
    return corpus


def commit() -> str:
    """Returns the commit of the code, for records. Raises RecordError if the code has uncommitted changes."""
    changed = _git("status", "--porcelain", "--", *CODE)
    if changed:
        raise RecordError(
            f"{changed.split()[-1]} has uncommitted changes, but each record names a commit: commit the file first"
        )
    return _git("rev-parse", "--short", "HEAD")


def _git(*words: str) -> str:
    git = ["git", *words]
    return subprocess.run(git, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
