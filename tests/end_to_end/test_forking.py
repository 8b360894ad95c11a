"""Learners in processes that fork: data loaders, Hugging Face's Trainer, Lightning, and `os.fork`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.world import core

BEGIN = """
import sys, threading, atoll, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
torch.manual_seed(0)
breath = threading.Event()
class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return {"x": torch.full((16,), index / 64)}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
    def forward(self, x): return {"loss": (self.layer(x) - x).pow(2).mean()}
def ended(learner): print("merged", learner.stats().merged, flush=True)
options = {"server": sys.argv[1], "name": "a", "drain_s": 5.0}
"""
PLAIN = """
model = Model(); optimizer = torch.optim.SGD(model.parameters(), 0.01)
with atoll.Learner(model, optimizer, **options) as learner:
    for epoch in range(4):
        for batch in DataLoader(Data(), batch_size=4, num_workers=2):
            optimizer.zero_grad(); model(**batch)["loss"].backward(); optimizer.step(); breath.wait(0.01)
            learner.step(tokens=8)
ended(learner)
"""
SAVING = PLAIN.replace("**options", "checkpoint_dir=sys.argv[2] + '/saved', checkpoint_every_s=0.05, **options")
REFUSED = """
model = Model(); optimizer = torch.optim.SGD(model.parameters(), 0.01)
with atoll.Learner(model, optimizer, **options) as learner:
    try: next(iter(DataLoader(Data(), num_workers=2)))
    except atoll.LearnerError as error: print(error)
    for step in range(3000):
        optimizer.zero_grad(); model(x=torch.ones(4, 16))["loss"].backward(); optimizer.step(); breath.wait(0.01)
        learner.step(tokens=8)
        if learner.stats().merged > 3: break
ended(learner)
"""
CHILD = """
import os, time
model = Model(); optimizer = torch.optim.SGD(model.parameters(), 0.01)
child = 0
with atoll.Learner(model, optimizer, **options) as learner:
    for step in range(80):
        optimizer.zero_grad(); model(x=torch.ones(4, 16))["loss"].backward(); optimizer.step(); breath.wait(0.01)
        try: learner.step(tokens=8)
        except atoll.LearnerError as error: print("child:", error, flush=True); break
        if step == 20 and not (child := os.fork()): began = time.monotonic()
if not child:
    assert time.monotonic() - began < 4, "it did not drain"
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
ended(learner)
"""
TRAINER = """
from transformers import Trainer, TrainingArguments
from atoll.integrations.transformers import AtollCallback
args = TrainingArguments(output_dir=sys.argv[2], per_device_train_batch_size=4, max_steps=64, dataloader_num_workers=2,
    use_cpu=True, report_to=[], save_strategy="no", lr_scheduler_type="constant", remove_unused_columns=False)
class Slow(AtollCallback):
    def on_step_end(self, *given, **named): breath.wait(0.01); super().on_step_end(*given, **named)
callback = Slow(tokens=lambda batch: batch["x"].numel(), **options)
Trainer(model=Model(), args=args, train_dataset=Data(), callbacks=[callback]).train()
ended(callback.learner)
"""
LIGHTNING = """
import lightning
from atoll.integrations.lightning import AtollCallback
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = Model()
    def training_step(self, batch, index): breath.wait(0.01); return self.inner(**batch)["loss"]
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.01)
callback = AtollCallback(tokens=lambda batch: batch["x"].numel(), **options)
lightning.Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback],
    enable_progress_bar=False).fit(Module(), DataLoader(Data(), batch_size=4, num_workers=2))
ended(callback.learner)
"""


def ran(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a core, and a learner script in its own process."""
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    with core(tmp_path) as running:
        command = [sys.executable, "-c", script, running.address, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=110, env=clean)


def merged(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split("merged ")[-1].split()[0])


def test_data_loaders_may_fork_inside_the_block(tmp_path):
    assert merged(ran(tmp_path, BEGIN + PLAIN)) > 5


@pytest.mark.slow
def test_data_loaders_may_fork_while_a_checkpoint_is_written(tmp_path):
    done = ran(tmp_path, BEGIN + SAVING + 'print("saved", learner.stats().checkpoints)\n')
    assert merged(done) > 5
    assert int(done.stdout.split("saved ")[-1]) > 5
    assert "could not save" not in done.stderr


@pytest.mark.ci
def test_a_fork_is_refused_in_one_line_if_grpc_was_imported_before_atoll(tmp_path):
    done = ran(tmp_path, f"import grpc\n{BEGIN}{REFUSED}")
    assert merged(done) > 3
    assert "cannot fork while it is a learner: grpc was imported before atoll" in done.stdout


@pytest.mark.slow
def test_a_forked_child_that_leaves_the_block_leaves_the_learner_alone(tmp_path):
    done = ran(tmp_path, BEGIN + CHILD)
    assert merged(done) > 3
    assert "child: this process is a fork of the learner's process" in done.stdout


@pytest.mark.frameworks
def test_the_callback_of_a_trainer_whose_loaders_fork(tmp_path):
    assert merged(ran(tmp_path, BEGIN + TRAINER)) > 3


@pytest.mark.frameworks
def test_the_callback_of_lightning_whose_loaders_fork(tmp_path):
    assert merged(ran(tmp_path, BEGIN + LIGHTNING)) > 3


@pytest.mark.parametrize("package", ["atoll", "atoll_wire", "atoll_server", "atoll_dashboard"])
def test_grpcs_fork_handlers_are_off_in_each_order_of_imports(package):
    script = f"import os, sys, {package}; print('grpc' in sys.modules, os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean)
    assert done.stdout == "False 0\n"
