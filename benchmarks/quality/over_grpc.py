"""Compares the baseline in real processes, a core and learners over gRPC, with its records in virtual time.

python -m benchmarks.quality.over_grpc [--seeds 3]: two minutes per seed, and more for runs without a record.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
from atoll.demo.processes import ATOLL, children
from atoll.reference import data
from atoll.reference.train import validation_loss
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from rich.console import Console
from safetensors.torch import load

from benchmarks.quality.grid import BASE
from benchmarks.quality.recipe import Recipe
from benchmarks.quality.records import RECORDS, Records, commit, make
from benchmarks.quality.train import WINDOWS, names
from benchmarks.quality.training import new_model

STEP_S = 0.1  # two CPUs compute four learners' steps in less time
RECORD = "over-grpc.json"
LONGEST_S = 300.0  # for starting and leaving; TimeoutExpired is raised after this


def through_processes(recipe: Recipe, step_s: float) -> dict[str, Any]:
    """Returns the final published model's validation loss, and the learners' own counters."""
    same = {
        name: getattr(BASE, name)
        for name in ("method", "run", "adoption", "merging", "down", "speeds", "policy", "shards", "fine_tuning")
    }
    assert replace(recipe, **same) == recipe, "the core's own defaults, and learners of one speed"
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        server = f"unix:{directory}/core"
        words = [*ATOLL, "core", "--listen", server, "--dir", f"{directory}/run", "--total-tokens", str(recipe.tokens)]
        group.serving(group.start("core", words, piped=True))
        given = json.dumps(asdict(recipe))
        learners = [
            group.start(name, [sys.executable, "-m", "benchmarks.quality.learner", server, name, str(step_s), given])
            for name in names(recipe)
        ]
        for learner in learners:
            if learner.process.wait(LONGEST_S + 10 * recipe.steps * step_s) != 0:
                raise SystemExit(f"{learner.name} ended: {learner.tail()}")
        with grpc.insecure_channel(server) as channel:
            chunks = rpc.OperatorStub(channel).ExportCheckpoint(pb.ExportCheckpointRequest())
            file = b"".join(reply.chunk for reply in chunks)
        said = [json.loads(learner.tail()) for learner in learners]
    model = new_model(recipe)
    model.load_state_dict(load(file), strict=True)
    loss = validation_loss(model, data.load(None, recipe.model.context), WINDOWS)
    return {"seed": recipe.seed, "loss": loss, "learners": said}


def main() -> None:
    """Trains, prints, and writes the results after each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=200)
    recipes = [replace(BASE, seed=seed) for seed in range(options.seeds)]
    records = Records.load()
    make(recipes, 2, console, records)
    runs: list[dict[str, Any]] = []
    made_by = commit()
    for recipe in recipes:
        virtual = records.read(recipe)
        assert virtual is not None, "made above"
        runs.append(through_processes(recipe, STEP_S) | {"virtual": virtual["loss"]})
        console.print(f"seed {recipe.seed}: {runs[-1]['loss']:.4f} over gRPC, {virtual['loss']:.4f} in virtual time")
        (RECORDS / RECORD).write_text(json.dumps({"commit": made_by, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
