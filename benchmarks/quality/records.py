"""Records of runs, a file each under records/quality: made once, read by the report."""

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

from benchmarks.quality.recipe import Recipe
from benchmarks.quality.train import train

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "records" / "quality"
CODE = ("benchmarks/quality", "forecast", "learner", "proto", "server")  # what decides a result
CORPUS = "d0f9a46ea1d4e01baac005c25f40b819bb2380e31d7d50587308a1934f499789"  # CPython 3.11.7's own library


class RecordError(UserError):
    """A record that could not be compared with the others, or not be made again."""


def path_of(recipe: Recipe, records: Path = RECORDS) -> Path:
    """Where its record is, or will be."""
    return records / f"{recipe.key()}.json"


def read(recipe: Recipe, records: Path = RECORDS) -> dict[str, Any] | None:
    """Its record; None: it was not run yet."""
    path = path_of(recipe, records)
    return json.loads(path.read_text()) if path.exists() else None


def make(recipes: Sequence[Recipe], workers: int, console: Console, records: Path = RECORDS) -> None:
    """Trains what has no record yet, so many at a time, and writes each record as soon as it is there.

    Raises RecordError where the text is another one, or the code is not as it was committed.
    """
    missing = [recipe for recipe in dict.fromkeys(recipes) if not path_of(recipe, records).exists()]
    console.print(f"{len(set(recipes)) - len(missing)} of {len(set(recipes))} records are there")
    records.mkdir(parents=True, exist_ok=True)
    of, began = commit(), time.monotonic()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        running = {pool.submit(_run, recipe): recipe for recipe in missing}
        for number, done in enumerate(as_completed(running), start=1):
            recipe, result = running[done], done.result()
            record = {"recipe": asdict(recipe), "commit": of, **result}
            part = path_of(recipe, records).with_suffix(".part")
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.rename(path_of(recipe, records))
            left_s = (time.monotonic() - began) * (len(missing) / number - 1)
            console.print(f"{number}/{len(missing)}, {left_s / 60:.0f} min left: {result['loss']:.4f} {recipe.key()}")


def _run(recipe: Recipe) -> dict[str, Any]:
    corpus = data.load(None, recipe.model.context)
    if corpus.sha256 != CORPUS:
        raise RecordError(
            f"the standard library here has sha256 {corpus.sha256[:12]}, the records are of {CORPUS[:12]} "
            "(CPython 3.11.7): use that Python"
        )
    return {"corpus": corpus.sha256, **train(recipe, corpus)}


def commit() -> str:
    """Of the code, which has to be as it was committed: the record names it."""
    changed = _git("status", "--porcelain", "--", *CODE)
    if changed:
        raise RecordError(
            f"{changed.split()[-1]} is not as it was committed, and records name a commit: commit it first"
        )
    return _git("rev-parse", "--short", "HEAD")


def _git(*words: str) -> str:
    git = ["git", *words]
    return subprocess.run(git, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
