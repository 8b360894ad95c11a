"""Learners with several ranks (sharded, replicated, tensor-parallel) in a run with a single-process learner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from atoll.model.parameters import Parameters
from atoll_server.cli.operator_client import OperatorTarget, export_checkpoint
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import joined
from atoll_wire.layout.layout import Layout, plan
from safetensors import safe_open
from torch import nn

from tests.end_to_end.island_rank import model_of
from tests.end_to_end.world import Core, core, eventually

SCRIPT = Path(__file__).with_name("island_rank.py")
LOCKSTEP = Path(__file__).with_name("lockstep_rank.py")
STEPS, FRAGMENTS = 80, 2
KINDS = [("fsdp", 2), ("tp", 2), ("ddp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp+tp", 4)]
IN_CI = {("fsdp", 2), ("tp", 2), ("fsdp+tp", 4)}
ON_DEVICES = [("fsdp/device", 2), ("hsdp/device", 4), ("fsdp+tp/device", 4)]


def started(kind: str, ranks: int, address: str, name: str, folder: Path, steps: int = STEPS) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    begin = [*launch, "--nproc-per-node", str(ranks)] if kind != "one" else [sys.executable]
    command = [*begin, str(SCRIPT), kind, address, name, str(steps), str(folder)]
    # Without this, torchrun's restarted ranks look for the previous ranks (pytorch issue 135712).
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def said(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def versions(ranks: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the checksum of each whole anchor, assembled from all ranks, by fragment and version."""
    found = {}
    for key in ranks[0]["anchors"]:
        parts = sorted((first, crc, size) for first, crc, size in (rank["anchors"][key] for rank in ranks) if size)
        found[key] = joined((crc, size) for _, crc, size in parts)
    return found


def planned() -> Layout:
    """Returns the run's layout, planned from a single-process model."""
    model, *_ = model_of("one")
    return plan(Parameters(model, torch.optim.AdamW(model.parameters())).tensors, FRAGMENTS)


def exported(running: Core, path: Path) -> dict[str, int]:
    """Exports the run's current parameters. Returns the checksum of each fragment, by fragment and version."""
    export_checkpoint(OperatorTarget(running.address), path, initial=False)
    layout, found = planned(), {}
    with safe_open(path, "pt") as file:
        versions = file.metadata()["atoll.versions"].split(",")
        values = {number: file.get_tensor(each.name).numpy().ravel() for number, each in enumerate(layout.tensors)}
    for fragment, version in zip(layout.fragments, versions, strict=True):
        pieces = [values[each.tensor][each.start : each.start + each.length] for each in fragment.pieces]
        found[f"{fragment.index}/{version}"] = frame_codec.vector_crc32c(np.concatenate(pieces))
    return found


def assert_same(one: dict[str, int], other: dict[str, int], at_least: int) -> None:
    """Checks that anchors of equal versions are equal, for at least this many versions."""
    both = one.keys() & other.keys()
    assert len(both) >= at_least
    assert {key: one[key] for key in both} == {key: other[key] for key in both}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param(*each, marks=pytest.mark.ci if each in IN_CI else pytest.mark.slow)
        for each in (*KINDS, *ON_DEVICES)
    ],
)
def test_an_island_and_a_single_process_have_the_same_anchors(tmp_path, kind, count):
    with core(tmp_path, "--inner-steps", "16", "--max-staleness", "8") as running:
        island = started(kind, count, running.address, "island", tmp_path)
        one = started("one", 1, running.address, "one", tmp_path)
        eventually(lambda: len(running.status().learners) == 2, 100)
        (tmp_path / "go").touch()
        eventually(lambda: running.status().contributions.merged > 4, 100)
        export = exported(running, tmp_path / "export.safetensors")
        for learner in (island, one):
            _, errors = learner.communicate(timeout=400)
            assert learner.returncode == 0, errors[-6000:]
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
    island, one = said(tmp_path, "island", count), said(tmp_path, "one", 1)
    assert all(rank["anchors"].keys() == island[0]["anchors"].keys() for rank in island), "ranks must adopt together"
    assert_same(versions(island), versions(one), 5)
    assert_same(versions(island), export, 1)
    assert [rank["mismatches"] for rank in (*island, *one)] == [0] * (count + 1)
    assert all(rank["run_tokens"] == island[0]["run_tokens"] for rank in island)
    assert all(rank["on_device"] is kind.endswith("/device") for rank in island)
    assert island[0]["merged"] > 2
    assert one[0]["merged"] > 2
    tokens = {each.learner: each.tokens for each in status.learners}
    assert tokens == {"island": 32 * STEPS, "one": 32 * STEPS}
    for ranks in (island, one):
        assert sum(ranks[0]["losses"][-10:]) < sum(ranks[0]["losses"][:10])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_process_and_islands_of_two_and_four_ranks_have_the_same_anchors_in_one_run(tmp_path):
    ranks = {"one": 1, "ddp": 2, "fsdp": 4}
    with core(tmp_path, "--inner-steps", "16", "--max-staleness", "8") as running:
        learners = [started(kind, count, running.address, kind, tmp_path) for kind, count in ranks.items()]
        eventually(lambda: len(running.status().learners) == len(ranks), 200)
        (tmp_path / "go").touch()
        eventually(lambda: running.status().contributions.merged > 6, 200)
        export = exported(running, tmp_path / "export.safetensors")
        for learner in learners:
            _, errors = learner.communicate(timeout=300)
            assert learner.returncode == 0, errors[-6000:]
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
    found = {kind: said(tmp_path, kind, count) for kind, count in ranks.items()}
    every = [rank for island in found.values() for rank in island]
    assert {rank["fingerprint"] for rank in every} == {planned().fingerprint.hex()}
    assert all(rank["anchors"].keys() == island[0]["anchors"].keys() for island in found.values() for rank in island)
    anchors = {kind: versions(island) for kind, island in found.items()}
    for kind in ("ddp", "fsdp"):
        assert_same(anchors[kind], anchors["one"], 5)
    assert_same(anchors["ddp"], anchors["fsdp"], 5)
    assert_same({key: crc for mine in anchors.values() for key, crc in mine.items()}, export, FRAGMENTS)
    assert not any(rank["mismatches"] for rank in every)
    assert {each.learner: each.tokens for each in status.learners} == dict.fromkeys(ranks, 32 * STEPS)
    for island in found.values():
        assert island[0]["merged"] > 2
        assert sum(island[0]["losses"][-10:]) < sum(island[0]["losses"][:10])


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("kind", "count"), KINDS)
def test_an_island_returns_after_the_kill_of_a_rank_and_then_of_the_core(tmp_path, kind, count):
    def steps(name: str) -> int:
        return sum(each.steps for each in running.status().learners if each.learner == name)

    with core(tmp_path, "--inner-steps", "16", "--max-staleness", "8") as running:
        island = started(kind, count, running.address, "island", tmp_path)
        one = started("one", 1, running.address, "one", tmp_path, 5 * STEPS)
        eventually(lambda: len(running.status().learners) == 2, 100)
        (tmp_path / "go").touch()
        eventually(lambda: steps("island") > 20, 100)
        process = tmp_path / f"island-{count - 1}.pid"
        first = process.read_text()
        os.kill(int(first), signal.SIGKILL)
        eventually(lambda: process.read_text() not in {"", first} and running.status().contributions.merged > 6, 100)
        running.kill()
        running.start()
        for learner in (island, one):
            _, errors = learner.communicate(timeout=400)
            assert learner.returncode == 0, errors[-6000:]
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
    island, one = said(tmp_path, "island", count), said(tmp_path, "one", 1)
    assert_same(versions(island), versions(one), 5)
    assert [rank["mismatches"] for rank in (*island, *one)] == [0] * (count + 1)
    assert island[0]["merged"] > 2
    assert {each.learner: each.incarnation for each in status.learners} == {"island": 2, "one": 1}
    assert sum(island[0]["losses"][-10:]) < sum(one[0]["losses"][:10]), "it must not start again"


# Ranks sum their gradients in a different order than one process. With float32 contributions, only this rounding
# differs. With int4, a value near the middle of two codes may get the other code. The learner keeps the remainder.
BOUNDS = {"float32": 1e-6, "int4": 1e-3}  # relative to the distance that the parameters moved


@pytest.mark.parametrize("codec", ["float32", "int4"])
@pytest.mark.ci
def test_four_ranks_train_what_one_process_trains_on_the_same_data(tmp_path, codec):
    found = {}
    for ranks in (1, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"] if ranks > 1 else []
        with core(folder, "--inner-steps", "1", "--fragments", "1", "--codec", codec) as running:
            command = [sys.executable, *launch, str(LOCKSTEP), running.address, str(tmp_path)]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr[-6000:]
        found[ranks] = torch.load(tmp_path / f"of-{ranks}.pt", weights_only=True)
    one, four = (torch.cat([values.flatten() for values in found[ranks].values()]) for ranks in (1, 4))
    moved = float((one - initial_parameters()).norm())
    assert moved > 1
    assert float((one - four).norm()) < BOUNDS[codec] * moved


def initial_parameters() -> torch.Tensor:
    """Returns the parameters that `lockstep_rank` begins with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 257), nn.Tanh(), nn.Linear(257, 48))
    return torch.cat([values.detach().flatten() for values in model.parameters()])
