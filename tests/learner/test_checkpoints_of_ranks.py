"""The ranks of one learner save one checkpoint, which any other number of ranks restores bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from atoll.checkpoints.directory import FACTS
from atoll.checkpoints.directory_lock import DirectoryLock
from atoll.ranks import rank_group
from atoll.ranks.rank_group import FAILED, SAVE, SAVING, Decision
from atoll_wire.process.clock import SYSTEM

from tests.learner.checkpoint_rank import SLOW_S, STEPS, live
from tests.learner.fake_core import FakeCore, fake_core
from tests.learner.saving import anchors


def lived(kind: str, size: int, core: FakeCore, folder: Path, name: str, *end: str) -> list[dict[str, Any]]:
    """Runs a learner with several ranks. Returns the reports of all ranks. end: "die" to let ranks kill themselves."""
    statuses, said = ended(kind, size, core, folder, name, *end)
    assert statuses == [-signal.SIGKILL if end else 0] * size, "".join(said)[-6000:]
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(size)]


def ended(kind: str, size: int, core: FakeCore, folder: Path, name: str, *end: str) -> tuple[list[int], list[str]]:
    """Runs a learner with several ranks. Returns the exit status and the log of each rank."""
    command = [sys.executable, "-m", "tests.learner.checkpoint_rank", kind]
    commands = [[*command, str(rank), str(size), core.address, str(folder), name, *end] for rank in range(size)]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1"}
    running = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True, env=env) for each in commands]
    try:
        said = [each.communicate(timeout=200)[1] for each in running]
    finally:
        for each in running:
            each.kill()
    return [each.returncode for each in running], said


def lived_here(core: FakeCore, folder: Path, kind: str = "one") -> list[dict[str, Any]]:
    """Runs a single-process learner in this process."""
    found: list[dict[str, Any]] = []
    live(kind, 0, 1, core.address, folder, found.append)
    return found


def check(before: list[dict[str, Any]], after: list[dict[str, Any]], core: FakeCore) -> None:
    """Checks that a learner began with the run's parameters, and with the other saved state of an earlier one."""
    saved, begun = before[0]["saved"], after[0]["begun"]
    assert all(torch.equal(value, each) for value, each in zip(begun["model"].values(), run(core), strict=True))
    assert not all(torch.equal(value, saved["model"][name]) for name, value in begun["model"].items())
    for part in ("optimizer", "average"):
        assert begun[part].keys() == saved[part].keys()
        assert all(torch.equal(value, saved[part][name]) for name, value in begun[part].items()), part
    assert len(saved["optimizer"]) >= 2 * len(saved["model"])
    assert begun["epoch"] == saved["epoch"] > 0
    same_size = len(before) == len(after)
    wanted = [report["saved"]["position"] if same_size or len(before) == 1 else 0 for report in before]
    assert [report["begun"]["position"] for report in after] == [
        wanted[min(rank, len(wanted) - 1)] for rank in range(len(after))
    ]


def run(core: FakeCore) -> list[torch.Tensor]:
    return [anchors(core, tensor.name, tensor.shape) for tensor in core.layout.tensors]


@pytest.mark.ci
def test_one_process_restores_what_two_sharded_ranks_saved(tmp_path):
    with fake_core() as core:
        first = lived("fsdp", 2, core, tmp_path, "first", "die")
        [folder] = (tmp_path / "saved" / "a").glob("checkpoint-*")
        assert json.loads((folder / FACTS).read_text())["ranks"] == 2
        assert {each.name for each in folder.glob("__*")} == {"__0_0.distcp", "__1_0.distcp"}
        sizes = [each.stat().st_size for each in folder.glob("__*")]
        assert max(sizes) < 1.1 * min(sizes), "each rank must write its own parts"
        with structlog.testing.capture_logs() as said:
            second = lived_here(core, tmp_path)
    check(first, second, core)
    for report in first:
        assert report["has_lock"], "every rank must lock the folder"
        assert len(report["steps_s"]) > 5, "training must continue while the last rank writes"
        assert max(report["steps_s"]) < SLOW_S / 2
    reasons = {each["name"]: each["reason"] for each in said if "extra state" in each["event"]}
    assert reasons == dict.fromkeys(
        ("position", "random"), "it differs between ranks, and the checkpoint has 2 ranks, not 1"
    )
    assert first[0]["begun"]["optimizer"] == {}
    assert second[0]["saved"]["optimizer"]["1.weight.step"] == 2 * STEPS


@pytest.mark.slow
def test_all_ranks_hear_that_another_learner_uses_the_folder(tmp_path):
    lock = DirectoryLock(tmp_path / "saved" / "a", SYSTEM)
    lock.take()
    with fake_core() as core:
        statuses, said = ended("fsdp", 2, core, tmp_path, "second")
        assert not core.joins
    lock.release()
    assert statuses == [1, 1]
    for each in said:
        assert f"/saved/a is in use by process {os.getpid()} on " in each.splitlines()[-1], each[-3000:]
    assert "rank 0 could not join the run" in said[1].splitlines()[-1]


def test_ranks_save_when_one_requests_it_and_no_rank_is_writing():
    wanted = {(SAVE, 0): True, (0, SAVE): True, (SAVE, SAVING): False, (SAVING, 0): False, (0, FAILED): False}
    for flags, save in wanted.items():
        assert rank_group._agreed(0, 1, Decision(), flags).save == save
    assert rank_group._agreed(0, 1, Decision(), (SAVE, FAILED | SAVE)).failed == (1,)


CHAINS = {
    "number": [("fsdp", 2), ("fsdp", 2), ("fsdp", 4), ("one", 1), ("fsdp", 4), ("fsdp", 2)],
    "mesh": [("hsdp", 4), ("fsdp+tp", 4), ("tp", 2), ("one", 1), ("fsdp+tp", 4)],
    "other shapes": [("fsdp/rows", 2), ("fsdp/rows", 2), ("one/rows", 1), ("fsdp/rows", 4)],
    "replicas": [("ddp", 2), ("ddp", 2), ("fsdp", 4), ("ddp", 2)],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_ranks_restore_what_other_ranks_saved(tmp_path, chain):
    with fake_core() as core:
        before: list[dict[str, Any]] = []
        for number, (kind, size) in enumerate(chain):
            end = ["die"] * (number % 2)
            after = (
                lived(kind, size, core, tmp_path, str(number), *end) if size > 1 else lived_here(core, tmp_path, kind)
            )
            if before:
                check(before, after, core)
            before = after
