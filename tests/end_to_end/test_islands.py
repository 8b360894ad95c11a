"""Learners of several ranks, in one run with a learner of one process: sharded, replicated and tensor-parallel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from atoll_wire.codec.checksums import joined
from torch import nn

from tests.end_to_end.world import core, eventually

SCRIPT = Path(__file__).with_name("island_rank.py")
LOCKSTEP = Path(__file__).with_name("lockstep_rank.py")
STEPS = 80
KINDS, MORE = [("fsdp", 2), ("tp", 2)], [("ddp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp+tp", 4)]


def started(kind: str, ranks: int, address: str, name: str, folder: Path, steps: int = STEPS) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    begin = [*launch, "--nproc-per-node", str(ranks)] if kind != "one" else [sys.executable]
    command = [*begin, str(SCRIPT), kind, address, name, str(steps), str(folder)]
    # Without this, torchrun's restarted ranks look for the ranks of before (pytorch issue 135712).
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def said(folder: Path, name: str, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def versions(ranks: list[dict[str, Any]]) -> dict[str, int]:
    """Returns the checksum of each whole anchor that the ranks had together, by fragment and version."""
    found = {}
    for key in ranks[0]["anchors"]:
        parts = sorted((first, crc, size) for first, crc, size in (rank["anchors"][key] for rank in ranks) if size)
        found[key] = joined((crc, size) for _, crc, size in parts)
    return found


@pytest.mark.parametrize(("kind", "count"), [*KINDS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)])
def test_an_island_and_a_single_process_have_the_same_anchors(tmp_path, kind, count):
    with core(tmp_path, "--inner-steps", "16", "--max-staleness", "8") as running:
        island = started(kind, count, running.address, "island", tmp_path)
        one = started("one", 1, running.address, "one", tmp_path)
        eventually(lambda: len(running.status().learners) == 2, 100)
        (tmp_path / "go").touch()
        for learner in (island, one):
            _, errors = learner.communicate(timeout=200)
            assert learner.returncode == 0, errors[-6000:]
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
    island, one = said(tmp_path, "island", count), said(tmp_path, "one", 1)
    assert all(rank["anchors"].keys() == island[0]["anchors"].keys() for rank in island), "all ranks adopt together"
    mine, theirs = versions(island), versions(one)
    both = mine.keys() & theirs.keys()
    assert len(both) > 4
    assert {key: mine[key] for key in both} == {key: theirs[key] for key in both}
    assert [rank["mismatches"] for rank in (*island, *one)] == [0] * (count + 1)
    assert all(rank["run_tokens"] == island[0]["run_tokens"] for rank in island)
    assert island[0]["merged"] > 2
    assert one[0]["merged"] > 2
    tokens = {each.learner: each.tokens for each in status.learners}
    assert tokens == {"island": 32 * STEPS, "one": 32 * STEPS}
    for ranks in (island, one):
        assert sum(ranks[0]["losses"][-10:]) < sum(ranks[0]["losses"][:10])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [*KINDS, *MORE])
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
            _, errors = learner.communicate(timeout=200)
            assert learner.returncode == 0, errors[-6000:]
        eventually(lambda: running.status().contributions.pending == 0)
        status = running.status()
    island, one = said(tmp_path, "island", count), said(tmp_path, "one", 1)
    mine, theirs = versions(island), versions(one)
    both = mine.keys() & theirs.keys()
    assert len(both) > 4
    assert {key: mine[key] for key in both} == {key: theirs[key] for key in both}
    assert [rank["mismatches"] for rank in (*island, *one)] == [0] * (count + 1)
    assert island[0]["merged"] > 2
    assert {each.learner: each.incarnation for each in status.learners} == {"island": 2, "one": 1}
    assert sum(island[0]["losses"][-10:]) < sum(one[0]["losses"][:10]), "it went on from the run's parameters"


# Ranks sum their gradients in another order than one process. With float32 contributions, this rounding is all that
# differs. With int4, a value near the middle of two codes may get the other code: its remainder stays at the learner.
BOUNDS = {"float32": 1e-6, "int4": 1e-3}  # relative to the distance that the parameters moved


@pytest.mark.parametrize("codec", BOUNDS)
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
