"""Exported checkpoints load into the plain model, and contain exactly the published parameters."""

from __future__ import annotations

import json
import shutil
import threading

import atoll
import pytest
import torch
from atoll_server.cli.operator_client import OperatorTarget, export_checkpoint, list_checkpoints, take_checkpoint
from atoll_server.cli.run_directory import export_from_directory
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.end_to_end.test_training import Somebodys
from tests.end_to_end.world import Trainee, core, eventually, small_model, task, train
from tests.server.test_folder_writer import load_folder


def _train_theirs(
    address: str, model: nn.Module, name: str = "theirs", steps: int = 80, *, frozen: bool = True
) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    generator, breath = torch.Generator().manual_seed(3), threading.Event()
    with atoll.Learner(model, optimizer, server=address, name=name, send_frozen=frozen) as learner:
        for _ in range(steps):
            x, y = task(generator)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            breath.wait(0.01)
            learner.step(tokens=32)


def test_an_export_loads_strictly_and_equals_what_a_new_learner_receives(tmp_path):
    torch.manual_seed(1)
    first = Somebodys()
    begun = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    with core(tmp_path) as running:
        _train_theirs(running.address, first)
        eventually(lambda: running.status().contributions.pending == 0)
        export_checkpoint(OperatorTarget(running.address), tmp_path / "now.safetensors", initial=False)
        export_checkpoint(OperatorTarget(running.address), tmp_path / "then.safetensors", initial=True)
        fresh = Somebodys()
        fresh.frozen.load_state_dict(first.frozen.state_dict())
        _train_theirs(running.address, fresh, "fresh", steps=0)
        running.stop()
        export_from_directory(running.directory, tmp_path / "offline.safetensors", initial=False)
    now, then = load_file(tmp_path / "now.safetensors"), load_file(tmp_path / "then.safetensors")
    plain = Somebodys()
    plain.load_state_dict(now, strict=True)
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, dict(plain.named_parameters())[name]), name
    assert not torch.equal(now["table.weight"], then["table.weight"])
    assert torch.equal(now["head.weight"], now["table.weight"])
    for name, tensor in then.items():
        assert torch.equal(tensor, begun[name]), name
        assert tensor.dtype == begun[name].dtype
    offline = load_file(tmp_path / "offline.safetensors")
    assert all(torch.equal(offline[name], now[name]) for name in now)


def test_an_export_names_the_frozen_parameters_that_it_lacks_and_loads_over_the_base(tmp_path, capsys):
    """As with LoRA: the first learner sends only trained parameters and buffers."""
    first, base = Somebodys(), Somebodys()
    base.load_state_dict(first.state_dict())
    lacking = {"frozen.weight", "frozen.bias"}
    with core(tmp_path) as running:
        _train_theirs(running.address, first, frozen=False)
        eventually(lambda: running.status().contributions.pending == 0)
        export_checkpoint(OperatorTarget(running.address), tmp_path / "now.safetensors", initial=False)
        assert 'warning: the file lacks "frozen.bias" and 1 more' in capsys.readouterr().out
        export_checkpoint(OperatorTarget(running.address), tmp_path / "then.safetensors", initial=True)
        assert 'warning: the file lacks "frozen.bias" and 1 more' in capsys.readouterr().out
        with pytest.raises(atoll.LearnerError, match="frozen parameters"):
            _train_theirs(running.address, Somebodys(), "other")
        fresh = Somebodys()
        fresh.load_state_dict(base.state_dict())
        _train_theirs(running.address, fresh, "fresh", steps=0)
    with safe_open(tmp_path / "now.safetensors", "pt") as file:
        assert set(json.loads(file.metadata()["atoll.frozen"])) == lacking
    found = base.load_state_dict(load_file(tmp_path / "now.safetensors"), strict=False)
    assert set(found.missing_keys) == lacking
    assert not found.unexpected_keys
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name


def test_an_exported_folder_equals_the_exported_file_and_starts_a_run(tmp_path, capsys):
    torch.manual_seed(1)
    with core(tmp_path) as running:
        _train_theirs(running.address, Somebodys())
        eventually(lambda: running.status().contributions.pending == 0)
        export_checkpoint(OperatorTarget(running.address), tmp_path / "one.safetensors", initial=False)
        said = capsys.readouterr().out.splitlines()[-1:]
        for initial in (True, False):  # the second export replaces the first one
            export_checkpoint(
                OperatorTarget(running.address), tmp_path / "online", initial=initial, max_file_bytes=3000
            )
        running.stop()
        export_from_directory(running.directory, tmp_path / "offline", initial=False, max_file_bytes=3000)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines if "MB in 3 files" in line] == [
        f"wrote {tmp_path / name}" for name in ("online", "online", "offline")
    ]
    assert [line for line in lines if "warning" in line] == 2 * said
    whole, content = load_file(tmp_path / "one.safetensors"), (tmp_path / "one.safetensors").read_bytes()
    for folder in (tmp_path / "online", tmp_path / "offline"):
        found = load_folder(folder)
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
        with safe_open(folder / "model-00003-of-00003.safetensors", "pt") as file, \
             safe_open(tmp_path / "one.safetensors", "pt") as one:  # fmt: skip
            assert file.metadata() == one.metadata()
            assert {"atoll.run", "atoll.generation", "atoll.versions", "atoll.initial"} < file.metadata().keys()
    with core(tmp_path / "next", "--init", str(tmp_path / "online")) as running:
        fresh = Somebodys()
        fresh.load_state_dict({name: tensor for name, tensor in whole.items() if "frozen" in name}, strict=False)
        _train_theirs(running.address, fresh, "fresh", steps=0)
        assert (running.directory / "initial.safetensors").read_bytes() == content
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_a_folder_may_have_a_tied_tensor_once(tmp_path):
    """Hugging Face's libraries save a tied tensor under one name."""
    given, folder = Somebodys(), tmp_path / "model"
    folder.mkdir()
    weight_map = dict[str, str]()
    for number, name in enumerate(name for name in given.state_dict() if name != "head.weight"):
        weight_map[name] = f"{number}.safetensors"
        save_file({name: given.state_dict()[name]}, folder / weight_map[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with core(tmp_path, "--init", str(folder)) as running:
        fresh = Somebodys()
        fresh.frozen.load_state_dict(given.frozen.state_dict())
        _train_theirs(running.address, fresh, "fresh", steps=0)
        export_checkpoint(OperatorTarget(running.address), tmp_path / "now.safetensors", initial=False)
    found = load_file(tmp_path / "now.safetensors")
    assert found.keys() == given.state_dict().keys()
    for name, tensor in given.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert torch.equal(fresh.head.weight, given.table.weight)


def test_a_folder_that_becomes_invalid_stops_the_learner_and_the_run_stays_empty(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(small_model().state_dict(), folder / "model.safetensors")
    with core(tmp_path, "--init", str(folder)) as running:
        (folder / "model.safetensors").unlink()
        trainee = Trainee(running.address, "a", lambda _: True)
        trainee.start()
        with pytest.raises(atoll.LearnerError, match=r"has neither model\.safetensors\.index\.json nor") as caught:
            trainee.done()
        assert "Unexpected" not in str(caught.value)
        assert "Traceback" not in running.log()
        assert running.status().parameters == 0


def test_a_run_started_from_a_file_ignores_the_first_learners_parameters(tmp_path):
    given = small_model(seed=7)
    save_file(given.state_dict(), tmp_path / "init.safetensors")
    with core(tmp_path, "--init", str(tmp_path / "init.safetensors")) as running:
        newcomer = Trainee(running.address, "a", lambda _: True, model=small_model(seed=8))
        newcomer.start()
        newcomer.done()
    for mine, wanted in zip(newcomer.model.parameters(), given.parameters(), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"0.weight": torch.zeros(32, 16)}, 'lack tensor "1.weight"'),
        (small_model().state_dict() | {"1.weight": torch.zeros(2, 2)}, '"1.weight" as F32 [2, 2]'),
        (
            small_model().state_dict() | {"1.weight": torch.full((48, 16), torch.nan)},
            'tensor "1.weight" of the initial parameters has infinite or NaN values',
        ),
    ],
)
def test_a_file_of_another_model_is_refused_and_the_run_stays_empty(tmp_path, tensors, said):
    save_file(tensors, tmp_path / "init.safetensors")
    with core(tmp_path, "--init", str(tmp_path / "init.safetensors")) as running:
        trainee = Trainee(running.address, "a", lambda _: True)
        trainee.start()
        with pytest.raises(atoll.LearnerError, match="cannot continue") as caught:
            trainee.done()
        assert said in str(caught.value)
        assert running.status().parameters == 0


@pytest.mark.ci
def test_converged_learners_continue_after_a_backup_is_restored(tmp_path):
    """After the restore, AdamW's steps are 100 times as large as usual, towards the later parameters."""
    stop = threading.Event()
    with core(tmp_path) as running:
        trainees = [Trainee(running.address, name, lambda _: stop.is_set(), pace_s=0.03, drain_s=3.0) for name in "ab"]
        for trainee in trainees:
            trainee.start()
        eventually(lambda: running.status().merges >= 20, 60)
        running.stop()
        shutil.copytree(running.directory, tmp_path / "backup")
        running.start()
        eventually(lambda: running.status().merges >= 60, 120)
        running.kill()
        shutil.rmtree(running.directory)
        shutil.copytree(tmp_path / "backup", running.directory)
        running.start()
        restored = running.status().merges
        eventually(lambda: any(trainee.error for trainee in trainees) or running.status().merges >= restored + 40, 120)
        stop.set()
        for trainee in trainees:
            trainee.done()
            assert trainee.learner.stats().merged > 0


def test_snapshots_can_be_taken_and_listed(tmp_path, capsys):
    with core(tmp_path) as running:
        train(running.address, "a", steps=40)
        take_checkpoint(OperatorTarget(running.address))
        assert "checkpoint 1 taken" in capsys.readouterr().out
        list_checkpoints(OperatorTarget(running.address))
        assert str(sum(f.version for f in running.status().fragments)) in capsys.readouterr().out


class Normalised(nn.Module):
    """A model with running averages that Atoll does not synchronise, and a frozen teacher that follows the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.head = nn.Embedding(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 32)
        self.teacher = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(x)))


def test_an_export_names_unsynchronised_tensors_and_how_to_recompute_averages(tmp_path, capsys):
    model, options = Normalised(), {"unshared": ["teacher.*"]}
    with core(tmp_path) as running:
        train(running.address, "a", steps=60, model=model, **options)
        export_checkpoint(OperatorTarget(running.address), tmp_path / "now.safetensors", initial=False)
        online = capsys.readouterr().out
        export_checkpoint(OperatorTarget(running.address), tmp_path / "then.safetensors", initial=True)
        assert "warning" not in capsys.readouterr().out
        running.stop()
        export_from_directory(running.directory, tmp_path / "offline.safetensors", initial=False)
    for said in (online, capsys.readouterr().out):
        assert 'warning: the file has only initial values for "norm.num_batches_tracked" and 4 more' in said
        assert "torch.optim.swa_utils.update_bn(loader, model)" in said
    with safe_open(tmp_path / "now.safetensors", "pt") as file:
        averages = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
        assert json.loads(file.metadata()["atoll.buffers"]) == averages
        assert "atoll.frozen" not in file.metadata()
        assert json.loads(file.metadata()["atoll.initial"]) == [
            "norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "teacher.bias", "teacher.weight",
        ]  # fmt: skip
    with core(tmp_path / "next", "--init", str(tmp_path / "now.safetensors")) as running:
        train(running.address, "a", steps=2, model=Normalised(), **options)
        assert "the initial parameters include tensors that an earlier run did not share" in running.log()

    exported = Normalised()
    exported.load_state_dict(load_file(tmp_path / "now.safetensors"), strict=True)
    x = torch.arange(32)
    initial, trained = exported.eval()(x), exported.train()(x)  # with initial averages, and with those of the batch
    assert (initial - trained).abs().max() > 0.1
    torch.optim.swa_utils.update_bn([x for _ in range(20)], exported)
    # Averages contain the unbiased variance, which is 32/31 of the batch's variance.
    torch.testing.assert_close(exported.eval()(x), trained, rtol=0.02, atol=0.05)


def test_a_learner_with_a_changing_teacher_can_rejoin(tmp_path):
    """A teacher is frozen but changes. If Join compared its values, no learner could rejoin."""
    model = Normalised()
    model.teacher.requires_grad_(False)
    with core(tmp_path) as running:
        train(running.address, "a", steps=5, model=model, unshared=["teacher.*"])
        with torch.no_grad():
            model.teacher.weight.lerp_(model.head.weight, 0.5)
        train(running.address, "a", steps=5, model=model, unshared=["teacher.*"])
        with pytest.raises(atoll.LearnerError, match=r"frozen parameters.*unshared="):
            train(running.address, "a", steps=1, model=model)
