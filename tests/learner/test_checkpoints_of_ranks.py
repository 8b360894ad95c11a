"""Two ranks of one learner save one checkpoint, which two ranks or one process restore."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import structlog
import torch
from atoll.checkpoints.directory import FACTS

from tests.learner.fake_core import fake_core
from tests.learner.saving import Saving, saved
from tests.learner.watched import mlp

RANK = """
import json, sys, threading, torch, torch.distributed as dist, atoll
from pathlib import Path
from tests.learner.watched import mlp
torch.set_num_threads(1)
rank, core, directory, report, store = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
breath = threading.Event()
class Loader:
    at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
model = mlp()
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader, scheduler = Loader(), torch.optim.lr_scheduler.StepLR(optimizer, 100)
extra = {"loader": loader, "scheduler": scheduler}
random = torch.Generator().manual_seed(rank)
def turn():
    x = torch.randn(16, 16, generator=random)
    optimizer.zero_grad()
    wrapped(x).square().mean().backward()
    optimizer.step(); scheduler.step()
    loader.at += 10 + rank
    learner.step(tokens=10)
options = {"checkpoint_dir": directory, "checkpoint_every_s": None, "extra_state": extra, "drain_s": 5.0}
with atoll.Learner(wrapped, optimizer, core, "a", connect_timeout_s=60, **options) as learner:
    steps = [int(state["step"]) for state in optimizer.state.values()]
    same = [optimizer.state[p]["exp_avg"].sum().item() if steps else 0.0 for p in model.parameters()]
    begun = [steps[:1], same, loader.at, scheduler.last_epoch]
    for _ in range(4): turn()
    if rank == 1: learner.save_checkpoint()
    turn()
    moments = [optimizer.state[p]["exp_avg"].sum().item() for p in model.parameters()]
    at = loader.at
    for _ in range(500):  # a fixed number of steps, because all ranks must make the same number
        breath.wait(0.02); learner.step(tokens=0)
    stats = learner.stats()
json.dump([begun, moments, at, stats.checkpoints, stats.checkpoints_failed], open(f"{report}{rank}", "w"))
dist.destroy_process_group()
"""


def train(directory, address: str, name: str) -> list[list]:
    """Trains with two ranks. Returns their reports."""
    (directory / "rank.py").write_text(RANK)
    places = [str(directory / each) for each in ("saved", f"{name}-report", f"{name}-store")]
    commands = [[sys.executable, str(directory / "rank.py"), str(rank), address, *places] for rank in (0, 1)]
    running = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        said = [each.communicate(timeout=200)[1] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], "".join(said)[-3000:]
    return [json.loads((directory / f"{name}-report{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.timeout(500)
def test_two_ranks_save_one_checkpoint_which_two_ranks_or_one_restore(tmp_path):
    with fake_core() as core:
        first = train(tmp_path, core.address, "first")
        assert [report[3:] for report in first] == [[1, 0], [1, 0]]
        [folder] = (tmp_path / "saved" / "a").iterdir()
        assert json.loads((folder / FACTS).read_text())["ranks"] == 2
        assert {each.name for each in folder.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
        found = saved(folder)
        for number, total in enumerate(first[0][1]):
            key = f"optimizer.0.state.{2 * (number // 2)}.{'bias' if number % 2 else 'weight'}.exp_avg"
            if key in found:
                assert found[key].sum().item() == total
        second = train(tmp_path, core.address, "second")
        for rank, ((_, moments, at, *_), (begun, *_)) in enumerate(zip(first, second, strict=True)):
            assert begun == [[5], moments, at, 5], f"rank {rank}"
        assert [at for _, _, at, *_ in first] == [50, 55]

        class Loader:
            at = 0

            def state_dict(self):
                return {"at": self.at}

            def load_state_dict(self, state):
                self.at = state["at"]

        model, loader = mlp(), Loader()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        extra = {"loader": loader, "scheduler": scheduler}
        with (
            structlog.testing.capture_logs() as said,
            Saving(core, tmp_path / "saved", model, optimizer, extra_state=extra) as it,
        ):
            assert int(optimizer.state[model[0].weight]["step"]) == 10
            assert scheduler.last_epoch == 10
            assert loader.at == 0
            it.turn(3)
    [line] = [each for each in said if "extra state" in each["event"]]
    assert line["name"] == "loader"
    assert line["reason"] == "it differs by rank, and the checkpoint has 2 ranks instead of 1"
