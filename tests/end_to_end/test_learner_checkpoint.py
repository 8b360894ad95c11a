"""A learner that is killed and restarted continues with its optimizer's state from its checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.world import Trainee, core, eventually
from tests.learner.saving import saved

LEARNER = """
import json, sys, threading, atoll, torch
from tests.end_to_end.world import small_model, task
from torch import nn
address, directory, report, steps = *sys.argv[1:4], int(sys.argv[4])
model, breath, generator = small_model(), threading.Event(), torch.Generator().manual_seed(1)
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
options = {"checkpoint_dir": directory, "checkpoint_every_s": 0.3, "connect_timeout_s": 30.0}
with atoll.Learner(model, optimizer, address, "a", **options) as learner:
    state = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    begun = {name: [int(s["step"]), s["exp_avg_sq"].tolist()] for name, s in state.items()}
    json.dump({"state": begun, "model": {n: p.tolist() for n, p in model.named_parameters()}}, open(report, "w"))
    for _ in range(steps):
        x, y = task(generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        breath.wait(0.01)
        learner.step(tokens=32, loss=loss.item())
"""


def start(directory: Path, address: str, name: str, steps: int) -> subprocess.Popen[str]:
    arguments = [address, str(directory / "saved"), str(directory / name), str(steps)]
    return subprocess.Popen([sys.executable, "-c", LEARNER, *arguments], stderr=subprocess.PIPE, text=True)


@pytest.mark.ci
def test_a_killed_learner_continues_with_its_optimizers_state(tmp_path):
    with core(tmp_path) as running:
        stop: list[bool] = []
        other = Trainee(running.address, "other", lambda _: bool(stop))
        other.start()
        killed = start(tmp_path, running.address, "first", 1_000_000)
        folders = tmp_path / "saved" / "a"
        eventually(lambda: len(list(folders.glob("checkpoint-????????"))) == 2, 60)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait(20) == -signal.SIGKILL
        newest = max(folders.glob("checkpoint-????????"))
        tensors = saved(newest)
        merges = running.status().merges
        eventually(lambda: running.status().merges > merges, 60)
        again = start(tmp_path, running.address, "second", 30)
        said = again.communicate(timeout=100)[1]
        stop.append(True)
        other.done()
        assert again.returncode == 0, said
    assert "restored a checkpoint: the optimizer continues from its saved state" in said
    begun = json.loads((tmp_path / "second").read_text())
    steps = {step for step, _ in begun["state"].values()}
    assert len(steps) == 1
    assert steps.pop() > 5
    for name, (_, moment) in begun["state"].items():
        key = f"optimizer.0.state.{name}.exp_avg_sq"
        assert key not in tensors or torch.equal(tensors[key], torch.tensor(moment))
    assert sum(f"optimizer.0.state.{name}.exp_avg_sq" in tensors for name in begun["state"]) >= 3
    same = [torch.equal(tensors[f"model.{name}"], torch.tensor(value)) for name, value in begun["model"].items()]
    assert not all(same), "the parameters must be the run's, which are newer"
