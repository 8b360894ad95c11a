"""A learner that codes on its parameters' device, with a real core: CPU tensors, and a GPU if there is one."""

from __future__ import annotations

import threading
from pathlib import Path

import atoll
import numpy as np
import pytest
import torch
from atoll import learner as public
from atoll.device.device_coder import DeviceCoder
from torch import nn

from tests.devices import DEVICES
from tests.end_to_end.world import Placed, Trainee, core, eventually

OUTER_STEPS, INNER_STEPS, WIDTH = 8, 4, 48


class Counted(DeviceCoder):
    """A coder that records the coded fragments."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.coded, self.updates, self.opened = [], [], []  # lists, because several threads append

    def ahead(self, anchor, shape):
        self.opened.append(anchor)
        return super().ahead(anchor, shape)

    def code(self, anchor, values, shape):
        self.coded.append(shape)
        return super().code(anchor, values, shape)

    def change(self, old, new, update, q, shape):
        self.updates.append(update)
        return super().change(old, new, update, q, shape)


def coding_on(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Context manager that makes learners code on this device. Yields their coder."""
    coder = Counted(device)
    monkeypatch.setattr(public, "coding_device", lambda _: coder.device)
    monkeypatch.setattr(public, "DeviceCoder", lambda _: coder)
    return coder


def lockstep(address: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, np.ndarray]:
    """Trains, and waits after each contribution until it is merged and adopted. Returns the model and its anchor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 257), nn.Tanh(), nn.Linear(257, WIDTH)).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data, breath = torch.Generator().manual_seed(1), threading.Event()
    with atoll.Learner(model, optimizer, address, "one") as learner:
        for number in range(1, OUTER_STEPS + 1):
            for _ in range(INNER_STEPS):
                x = torch.randn(32, WIDTH, generator=data).to(device, dtype)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), x.sin()).backward()
                optimizer.step()
            learner.step(tokens=INNER_STEPS * 32)
            optimizer.zero_grad()
            while learner.stats().versions != (number,):
                breath.wait(0.01)
                optimizer.step()  # a step without training, because the core opens rounds only for learners that step
                learner.step(tokens=0)
        assert learner.stats().merged == OUTER_STEPS
        assert learner.stats().mismatches == 0
        [track] = learner._boundary.local.tracks
    return model, track.anchor


def trained(folder: Path, codec: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, np.ndarray]:
    folder.mkdir()
    with core(folder, "--inner-steps", "1", "--fragments", "1", "--codec", codec) as running:
        return lockstep(running.address, dtype, device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    ("codec", "dtype"), [("int4", torch.float32), pytest.param("int8", torch.bfloat16, marks=pytest.mark.ci)]
)
def test_training_through_a_core_is_bit_identical_on_a_device(tmp_path, codec, dtype, device, monkeypatch):
    monkeypatch.setattr(public, "coding_device", lambda _: None)
    host, host_anchor = trained(tmp_path / "host", codec, dtype, device)
    coder = coding_on(device, monkeypatch)
    model, anchor = trained(tmp_path / "device", codec, dtype, device)
    assert len(coder.coded) == len(coder.updates) == OUTER_STEPS
    assert None not in coder.updates
    assert len(coder.opened) >= OUTER_STEPS - 1, "the first round may open before the first anchor arrives"
    assert np.array_equal(anchor, host_anchor)
    assert all(map(torch.equal, model.parameters(), host.parameters()))


def hundred_steps(trainee: Trainee) -> bool:
    return len(trainee.losses) >= 100


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_learners_on_devices_train_one_model(tmp_path, device, monkeypatch):
    coder = coding_on(device, monkeypatch)
    with core(tmp_path) as running:
        trainees = [Trainee(running.address, name, hundred_steps, model=Placed(device)) for name in "ab"]
        for trainee in trainees:
            trainee.start()
        first, second = (trainee.done() for trainee in trainees)
        eventually(lambda: running.status().contributions.pending == 0)
        counts = running.status().contributions
    assert np.mean(first.losses[-10:]) < 0.6 * first.losses[0]
    assert counts.refused == 0
    assert len(coder.coded) == counts.merged > 10
    assert [trainee.learner.stats().mismatches for trainee in (first, second)] == [0, 0]
