"""A learner that codes on its parameters' device, through a real core. CPU tensors replace the device's tensors."""

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

from tests.end_to_end.world import core, eventually, train

OUTER_STEPS, INNER_STEPS, WIDTH = 8, 4, 48


class Counted(DeviceCoder):
    """Records what it codes."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
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


def device(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Makes learners code as on a device, and returns their coder."""
    coder = Counted()
    monkeypatch.setattr(public, "coding_device", lambda _: coder.device)
    monkeypatch.setattr(public, "DeviceCoder", lambda _: coder)
    return coder


def lockstep(address: str, dtype: torch.dtype) -> tuple[nn.Module, np.ndarray]:
    """Trains, and waits after each contribution until it is merged and adopted. Returns the model and its anchor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 257), nn.Tanh(), nn.Linear(257, WIDTH)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data, breath = torch.Generator().manual_seed(1), threading.Event()
    with atoll.Learner(model, optimizer, address, "one") as learner:
        for number in range(1, OUTER_STEPS + 1):
            for _ in range(INNER_STEPS):
                x = torch.randn(32, WIDTH, generator=data).to(dtype)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), x.sin()).backward()
                optimizer.step()
            learner.step(tokens=INNER_STEPS * 32)
            optimizer.zero_grad()
            while learner.stats().versions != (number,):
                breath.wait(0.01)
                optimizer.step()  # changes nothing, but the core opens rounds only while steps are taken
                learner.step(tokens=0)
        assert learner.stats().merged == OUTER_STEPS
        assert learner.stats().mismatches == 0
        [track] = learner._boundary.local.tracks
    return model, track.anchor


def trained(folder: Path, codec: str, dtype: torch.dtype) -> tuple[nn.Module, np.ndarray]:
    folder.mkdir()
    with core(folder, "--inner-steps", "1", "--fragments", "1", "--codec", codec) as running:
        return lockstep(running.address, dtype)


@pytest.mark.parametrize(("codec", "dtype"), [("int4", torch.float32), ("int8", torch.bfloat16)])
def test_training_through_a_core_is_bit_identical_on_a_device(tmp_path, codec, dtype, monkeypatch):
    host, host_anchor = trained(tmp_path / "host", codec, dtype)
    coder = device(monkeypatch)
    model, anchor = trained(tmp_path / "device", codec, dtype)
    assert len(coder.coded) == len(coder.updates) == OUTER_STEPS
    assert None not in coder.updates
    assert len(coder.opened) >= OUTER_STEPS - 1, "the first round may open before the first anchor arrives"
    assert np.array_equal(anchor, host_anchor)
    assert all(map(torch.equal, model.parameters(), host.parameters()))


def test_learners_on_devices_train_one_model(tmp_path, monkeypatch):
    coder = device(monkeypatch)
    with core(tmp_path) as running:
        first, second = train(running.address, "a", "b", steps=100)
        eventually(lambda: running.status().contributions.pending == 0)
        counts = running.status().contributions
    assert np.mean(first.losses[-10:]) < 0.6 * first.losses[0]
    assert counts.refused == 0
    assert len(coder.coded) == counts.merged > 10
    assert [trainee.learner.stats().mismatches for trainee in (first, second)] == [0, 0]
