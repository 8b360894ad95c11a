"""Records of runs, a file each under records/quality: made once, read by the report."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from atoll.reference import data
from rich.console import Console

from benchmarks.quality.recipe import Recipe
from benchmarks.quality.train import train

RECORDS = Path(__file__).parents[2] / "records" / "quality"
CORPUS = "d0f9a46ea1d4e01baac005c25f40b819bb2380e31d7d50587308a1934f499789"  # CPython 3.11.7's own library


class CorpusError(RuntimeError):
    """Another text: losses could not be compared."""


def path_of(recipe: Recipe, records: Path = RECORDS) -> Path:
    """Where its record is, or will be."""
    return records / f"{recipe.key()}.json"


def read(recipe: Recipe, records: Path = RECORDS) -> dict[str, Any] | None:
    """Its record; None: it was not run yet."""
    path = path_of(recipe, records)
    return json.loads(path.read_text()) if path.exists() else None


def make(recipes: Sequence[Recipe], workers: int, console: Console, records: Path = RECORDS) -> None:
    """Trains what has no record yet, so many at a time, and writes each record as soon as it is there."""
    missing = [recipe for recipe in dict.fromkeys(recipes) if not path_of(recipe, records).exists()]
    console.print(f"{len(set(recipes)) - len(missing)} of {len(set(recipes))} records are there")
    records.mkdir(parents=True, exist_ok=True)
    commit = _commit()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        running = {pool.submit(_run, recipe): recipe for recipe in missing}
        for number, done in enumerate(as_completed(running), start=1):
            recipe, result = running[done], done.result()
            record = {"recipe": asdict(recipe), "commit": commit, **result}
            part = path_of(recipe, records).with_suffix(".part")
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.rename(path_of(recipe, records))
            console.print(f"{number}/{len(missing)} {result['loss']:.4f} {result['wall_s']:.0f} s  {recipe.key()}")


def _run(recipe: Recipe) -> dict[str, Any]:
    corpus = data.load(None, recipe.model.context)
    if corpus.sha256 != CORPUS:
        raise CorpusError(
            f"the standard library here has sha256 {corpus.sha256[:12]}, the records are of {CORPUS[:12]} "
            "(CPython 3.11.7): use that Python"
        )
    return {"corpus": corpus.sha256, **train(recipe, corpus, lambda _: None)}


def _commit() -> str:
    """Of the code, with a plus when it was changed since."""
    git = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
