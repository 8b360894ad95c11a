"""A learner's checkpoints hold the state of one step, and a restarted learner's optimizer continues from them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from atoll import Learner, LearnerError, RandomState
from atoll.checkpoints import storage
from atoll.checkpoints.directory import FACTS, CheckpointDirectory, RunFacts
from atoll_wire.codec.checksums import crc32c
from torch import nn

from tests.devices import DEVICES
from tests.learner.loops import until
from tests.learner.saving import Saving, events, pause, saved
from tests.learner.test_movement_watch import Masters
from tests.learner.test_movement_watch_quiet import ScheduleFree
from tests.learner.watched import mlp

# ------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_checkpoint_holds_the_values_of_one_step_while_training_continues(core, tmp_path, gate, device):
    with Saving(core, tmp_path, mlp(device=device)) as it:
        it.turn(5)
        it.learner.save_checkpoint()
        it.turn()
        values = it.values()
        moments = {name: it.optimizer.state[p]["exp_avg_sq"].clone() for name, p in it.model.named_parameters()}
        it.turn(20)
        assert any(not torch.equal(value, values[name]) for name, value in it.model.named_parameters())
        gate.set()
        it.settle(1)
        found = saved(it.folders()[-1])
    for name, value in values.items():
        assert torch.equal(found[f"model.{name}"], value.cpu())
        if value.numel() >= 64:
            assert torch.equal(found[f"optimizer.0.state.{name}.exp_avg_sq"], moments[name].cpu())


def test_two_checkpoints_are_written_one_after_the_other(core, tmp_path, gate):
    with Saving(core, tmp_path) as it:
        it.learner.save_checkpoint()
        it.turn()
        it.learner.save_checkpoint()
        until(it.folders)  # another thread creates it
        it.turn(10)
        assert len(it.folders()) == 1
        gate.set()
        it.settle(2)
        assert it.learner.stats().checkpoints == 2


def test_a_checkpoint_is_saved_at_each_interval(core, tmp_path):
    with Saving(core, tmp_path, checkpoint_every_s=0.05) as it:
        it.until(lambda: it.learner.stats().checkpoints >= 3)


def test_the_newest_two_checkpoints_are_kept_and_numbers_continue_after_a_restart(core, tmp_path):
    with Saving(core, tmp_path) as it:
        for _ in range(3):
            it.save()
        assert [each.name for each in it.folders()] == ["checkpoint-00000002", "checkpoint-00000003"]
    with Saving(core, tmp_path) as it:
        it.save()
        assert [each.name for each in it.folders()] == ["checkpoint-00000003", "checkpoint-00000004"]


def test_leaving_saves_a_requested_checkpoint(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        it.turn(3)
        it.learner.save_checkpoint()
    assert it.learner.stats().checkpoints == 1
    assert len(it.folders()) == 1
    [line] = events(said, "saved a checkpoint")
    assert 0 <= line["staged_s"] <= line["took_s"]


def test_leaving_waits_for_a_checkpoint_that_is_being_written(core, tmp_path, gate):
    with Saving(core, tmp_path) as it:
        it.learner.save_checkpoint()
        it.learner.step(tokens=0)  # so that leaving has no work to send
        threading.Timer(1.0, gate.set).start()
    assert it.learner.stats().checkpoints == 1
    assert (it.folders()[-1] / FACTS).exists()


def test_leaving_saves_a_checkpoint_that_was_requested_during_another_write(core, tmp_path, gate):
    with Saving(core, tmp_path) as it:
        it.learner.save_checkpoint()
        it.turn()
        it.learner.save_checkpoint()
        it.turn(2)
        threading.Timer(1.0, gate.set).start()
    assert it.learner.stats().checkpoints == 2
    assert [json.loads((folder / FACTS).read_text())["steps"] for folder in it.folders()] == [1, 3]
    with pytest.raises(LearnerError, match="left"):
        it.learner.save_checkpoint()


DISK_FULL = """
import json, resource, signal, sys, torch, atoll
from tests.learner.saving import Saving, pause
from tests.devices import DEVICES
from tests.learner.watched import mlp
class Core: address = sys.argv[1]
from pathlib import Path
with Saving(Core, Path(sys.argv[2])) as it:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    it.learner.save_checkpoint()
    it.turn()
    it.settle(1)
    it.turn(5)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = [each.name for each in it.folders()]
    it.save()
    stats = it.learner.stats()
print(json.dumps([stats.checkpoints, stats.checkpoints_failed, stats.steps > 6, left]))
"""


def test_a_failed_write_logs_one_line_and_removes_its_folder(core, tmp_path, said, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with Saving(core, tmp_path) as it:
        with monkeypatch.context() as patched:
            patched.setattr(storage._Writer, "write_data", full)
            it.learner.save_checkpoint()
            it.turn()
            it.settle(1)
        assert it.learner.stats().checkpoints_failed == 1
        assert not it.folders()
        it.save()
    [line] = events(said, "could not save a checkpoint: training continues")
    assert "No space left on device" in line["error"]


@pytest.mark.slow
def test_a_full_disk_logs_one_line_and_stops_no_step(core, tmp_path):
    command = [sys.executable, "-c", DISK_FULL, core.address, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[1, 1, true, []]"
    lines = [line for line in done.stderr.splitlines() if "could not save a checkpoint: training continues" in line]
    assert len(lines) == 1
    assert "File too large" in lines[0], lines[0]
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------ restoring


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_restarted_learner_has_the_runs_parameters_and_its_optimizers_state(core, tmp_path, said, device):
    with Saving(core, tmp_path, mlp(device=device)) as it:
        it.turn(5)
        it.merge()
        it.save()
        state = it.optimizer.state_dict()["state"]
        old = {number: {key: value.clone() for key, value in each.items()} for number, each in state.items()}
        it.merge()
        steps = it.learner.stats().steps
    with Saving(core, tmp_path, mlp(device=device)) as again:
        assert all(torch.equal(value.cpu(), again.anchors()[name]) for name, value in again.values().items())
        assert again.learner._boundary.local.tracks[0].flying is None
        new = again.optimizer.state_dict()["state"]
        assert old.keys() == new.keys()
        for number, each in old.items():
            assert all(torch.equal(value, new[number][key]) for key, value in each.items())
        again.turn(20)
        assert again.learner.stats().steps == 20
        facts = CheckpointDirectory(tmp_path, "a").candidates(again.learner._run_facts())[0][1]
        again.merge()
    [line] = events(said, "restored a checkpoint")
    assert line["steps"] == facts.steps < steps


def test_a_copy_of_the_parameters_moves_by_the_change_since_the_checkpoint(core, tmp_path):
    """Otherwise, the optimizer's next step would undo the join.

    z is too far from y to be recognised without the checkpoint.
    """
    model = mlp()
    with Saving(core, tmp_path, model, ScheduleFree(model.parameters(), 0.05)) as it:
        it.save()  # here, the learner recognises z, which is still near y
        it.turn(4)
        it.merge()
        with torch.no_grad():
            for parameter in model.parameters():
                it.optimizer.state[parameter]["z"].mul_(2)
        it.save()
        then = {name: (p.detach().clone(), it.optimizer.state[p]["z"].clone()) for name, p in model.named_parameters()}
        it.merge()
    model = mlp()
    with Saving(core, tmp_path, model, ScheduleFree(model.parameters(), 0.05)) as again:
        for name, parameter in model.named_parameters():
            y, z = then[name]
            now = again.optimizer.state[parameter]["z"]
            assert torch.equal(parameter, again.anchors()[name])
            assert not torch.equal(parameter, y)
            torch.testing.assert_close(now - z, parameter.detach() - y, atol=1e-6, rtol=1e-5)


def test_named_copies_are_saved_and_moved(core, tmp_path):
    def learner() -> Saving:
        model = mlp(torch.bfloat16)
        optimizer = Masters(model, 0.05)
        pairs = lambda: zip(optimizer.shared, optimizer.masters, strict=True)  # noqa: E731
        return Saving(core, tmp_path, model, optimizer, copies=pairs)

    with learner() as it:
        it.turn(5)
        it.save()
        local = [p.detach().float() for p in it.optimizer.shared]
        masters = [master.clone() for master in it.optimizer.masters]
        it.merge()
    with learner() as again:
        pairs = zip(again.optimizer.shared, again.optimizer.masters, local, masters, strict=True)
        for parameter, master, old, old_master in pairs:
            torch.testing.assert_close(master - old_master, parameter.detach().float() - old, atol=1e-6, rtol=1e-5)
        assert all(torch.equal(value, again.anchors()[name]) for name, value in again.values().items())


def test_float32_state_of_bfloat16_parameters_is_not_rounded(core, tmp_path):
    class Float32(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros(parameter.shape))
                average.lerp_(parameter.grad.float(), 0.1)
                parameter.add_(average.to(parameter.dtype), alpha=-0.1)

    model = mlp(torch.bfloat16)
    with Saving(core, tmp_path, model, Float32(model.parameters(), 0.1)) as it:
        it.turn(3)
        it.save()
        old = [it.optimizer.state[p]["average"].clone() for p in model.parameters()]
    model = mlp(torch.bfloat16)
    with Saving(core, tmp_path, model, Float32(model.parameters(), 0.1)) as it:
        new = [it.optimizer.state[p]["average"] for p in model.parameters()]
        assert all(map(torch.equal, old, new))


def test_buffers_and_unshared_parameters_return_as_they_were(core, tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.body, self.head = nn.BatchNorm1d(16), nn.Linear(16, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.head(self.body(self.norm(x)))

    with Saving(core, tmp_path, Model(), unshared=["head.*"]) as it:
        it.turn(5)
        it.save()
        then = {name: value.clone() for name, value in it.model.state_dict().items()}
    with Saving(core, tmp_path, Model(), unshared=["head.*"]) as again:
        now = again.model.state_dict()
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "head.weight", "head.bias"):
            assert torch.equal(now[name], then[name]), name


def test_several_optimizers_are_restored_with_a_changed_order_of_parameters(core, tmp_path):
    def learner(*, turned: bool) -> Saving:
        model = mlp()
        first = list(model.named_parameters())[:2]
        others = [p for _, p in list(model.named_parameters())[2:]]
        both = [torch.optim.AdamW([p for _, p in (reversed(first) if turned else first)]), torch.optim.SGD(others, 0.1)]
        it = Saving(core, tmp_path, model, both)
        it.optimizer = both[0]
        return it

    with learner(turned=False) as it:
        it.turn(3)
        it.save()
        weight, bias = it.model[0].weight, it.model[0].bias
        old = [it.optimizer.state[p]["exp_avg"].clone() for p in (weight, bias)]
    with learner(turned=True) as again:
        new = [again.optimizer.state[p]["exp_avg"] for p in (again.model[0].weight, again.model[0].bias)]
        assert all(map(torch.equal, old, new))


def test_other_objects_continue_from_their_saved_state(core, tmp_path):
    class Loader:
        def __init__(self):
            self.at, self.seen = 0, torch.zeros(100)

        def state_dict(self):
            return {"at": self.at, "nested": [{"seen": self.seen}, ("tuple", None, b"bytes")]}

        def load_state_dict(self, state):
            assert state["nested"][1] == ("tuple", None, b"bytes")
            self.at, self.seen = state["at"], state["nested"][0]["seen"]

    def learner() -> tuple[Saving, Loader, torch.optim.lr_scheduler.LRScheduler]:
        model, loader = mlp(), Loader()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])  # this scheduler's state has a Counter
        extra = {"loader": loader, "scheduler": scheduler, "random": RandomState()}
        return Saving(core, tmp_path, model, optimizer, extra_state=extra), loader, scheduler

    it, loader, scheduler = learner()
    with it:
        it.turn(3)
        scheduler.step()
        scheduler.step()
        loader.at, loader.seen = 7, torch.arange(100.0)
        it.learner.save_checkpoint()
        it.turn()
        drawn = torch.rand(3)
        loader.seen.zero_()
        it.settle(1)
    it, loader, scheduler = learner()
    with it:
        assert torch.equal(torch.rand(3), drawn)
        assert loader.at == 7
        assert torch.equal(loader.seen, torch.arange(100.0))
        assert scheduler.last_epoch == 2
        assert it.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_an_object_that_cannot_save_skips_a_checkpoint_and_one_that_cannot_load_stops_the_start(core, tmp_path, said):
    class Odd:
        broken = False

        def state_dict(self):
            if self.broken:
                raise ValueError("not now")
            return {}

        def load_state_dict(self, state):
            raise KeyError("position")

    odd = Odd()
    with Saving(core, tmp_path, extra_state={"odd": odd}) as it:
        it.save()
        odd.broken = True
        it.learner.save_checkpoint()
        it.turn()
        it.settle(2)
        assert it.learner.stats().checkpoints_failed == 1
    [line] = events(said, "could not save")
    assert line["error"] == 'extra_state["odd"].state_dict() raised ValueError (not now): correct this method'
    with pytest.raises(
        LearnerError, match=r'extra_state\["odd"\] could not load .*KeyError.* move the checkpoint away'
    ):
        Saving(core, tmp_path, extra_state={"odd": odd}).__enter__()


# ------------------------------------------------------------------------------ checkpoints that are not used


def spoil_marker(folder):
    (folder / FACTS).unlink()


def spoil_size(folder):
    os.truncate(next(folder.glob("*.distcp")), 1000)


def spoil_bit(folder):
    path = next(folder.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def spoil_run(folder):
    path = folder / FACTS
    path.write_text(path.read_text().replace('"run": "fake"', '"run": "other"'))


def spoil_layout(folder):
    path = folder / FACTS
    text = path.read_text()
    start = text.index('"layout": "') + len('"layout": "')
    path.write_text(text[:start] + "0000" + text[start + 4 :])


REASONS = {
    spoil_marker: "it is not complete",
    spoil_size: "does not match its entry in atoll.json",
    spoil_bit: "does not match its checksum",
    spoil_run: 'it belongs to the run "other", but this run is "fake"',
    spoil_layout: "it belongs to a run with a different layout",
}


@pytest.mark.parametrize(("spoil", "reason"), REASONS.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_an_unusable_checkpoint_is_named_and_kept_and_the_older_one_is_used(core, tmp_path, said, spoil, reason):
    with Saving(core, tmp_path) as it:
        it.turn(3)
        it.save()
        it.turn(3)
        spoil(it.save())
    there = sorted(each.relative_to(tmp_path) for each in tmp_path.rglob("*"))
    with Saving(core, tmp_path) as again:
        assert int(next(iter(again.optimizer.state.values()))["step"]) == 4
        assert there == sorted(each.relative_to(tmp_path) for each in tmp_path.rglob("*"))
        for _ in range(3):
            assert again.save().name > "checkpoint-00000002"
        assert len(again.folders()) == 3, "pruning must not remove the unusable checkpoint"
    [line] = events(said, "ignoring a checkpoint")
    assert reason in line["reason"], line
    assert line["log_level"] == "warning"


def test_a_checkpoint_that_does_not_fit_the_optimizer_is_kept_unused(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        it.save()
    model = mlp()
    groups = [{"params": [p]} for p in model.parameters()]
    with Saving(core, tmp_path, model, torch.optim.AdamW(groups)) as again:
        assert not again.optimizer.state
    [line] = events(said, "ignoring a checkpoint")
    assert line["reason"] == "its optimizer has different parameters or parameter groups"


def test_a_checkpoint_of_another_optimizer_is_kept_unused(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        it.save()
    model = mlp()
    with Saving(core, tmp_path, model, torch.optim.RAdam(model.parameters())) as again:
        assert not again.optimizer.state
    [line] = events(said, "ignoring a checkpoint")
    assert line["reason"] == "it was saved with AdamW, but this learner has RAdam"


def test_a_learning_rate_of_numpy_is_saved(core, tmp_path):
    model = mlp()
    with Saving(core, tmp_path, model, torch.optim.AdamW(model.parameters(), lr=np.float64(0.25))) as it:
        it.save()
    with Saving(core, tmp_path) as again:
        assert again.optimizer.param_groups[0]["lr"] == 0.25


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_no_code_in_a_checkpoint_runs(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        folder = it.save()
    size = (folder / ".metadata").stat().st_size
    ran = tmp_path / "ran"
    evil = pickle.dumps(Evil(ran))
    (folder / ".metadata").write_bytes(evil + bytes(size - len(evil)))
    facts = json.loads((folder / FACTS).read_text())
    facts["files"][".metadata"][1] = crc32c((folder / ".metadata").read_bytes())
    (folder / FACTS).write_text(json.dumps(facts))
    with Saving(core, tmp_path):
        pass
    assert not ran.exists()
    [line] = events(said, "ignoring a checkpoint")
    assert "posix.system" in line["reason"]


def test_a_checkpoint_of_a_later_generation_is_used(core, tmp_path):
    with Saving(core, tmp_path) as it:
        it.save()
        run = it.learner._run_facts()
    earlier = RunFacts(run.run, run.layout, run.generation - 1)
    assert len(CheckpointDirectory(tmp_path, "a").candidates(earlier)) == 1


def test_a_learner_of_another_name_has_its_own_checkpoints(core, tmp_path, said):
    with Saving(core, tmp_path) as it:
        it.save()
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with Learner(model, optimizer, core.address, "b", checkpoint_dir=tmp_path, connect_timeout_s=20, drain_s=1):
        assert not optimizer.state
    assert not events(said, "ignoring a checkpoint")
    assert events(said, "no checkpoint was restored")[-1]["directory"] == str(tmp_path / "b")


# ------------------------------------------------------------------------------ the training loop


def test_a_directory_that_cannot_be_created_gives_a_one_line_error(core, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LearnerError, match=r"checkpoint_dir: .*/file/a cannot be used \(Not a directory\)"):
        Saving(core, tmp_path / "file").__enter__()


def test_a_save_that_cannot_begin_skips_a_checkpoint(core, tmp_path, said, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(storage, "async_save", failing)
    with Saving(core, tmp_path) as it:
        it.learner.save_checkpoint()
        it.turn()
        it.settle(1)
    assert events(said, "could not save")[0]["error"] == "can't start new thread"


def test_a_step_waits_only_for_the_copy(core, tmp_path, gate):
    with Saving(core, tmp_path) as it:
        it.learner.save_checkpoint()
        it.turn()
        until(lambda: it.folders() or pause())
        blocked = it.learner.stats().blocked_s
        it.turn(5)
        assert it.learner.stats().blocked_s - blocked < 1.0
        assert it.learner.stats().checkpoints == 0
        gate.set()
