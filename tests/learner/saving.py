"""A learner that saves checkpoints, with a core that the test controls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from atoll import Learner
from atoll.checkpoints import storage
from torch import nn

from tests.learner.fake_core import FakeCore
from tests.learner.loops import BREATH, until
from tests.learner.watched import mlp

WAIT_S = 60.0


class Saving:
    """A learner that trains a small model, and saves to `directory`. options: of the Learner."""

    def __init__(
        self, core: FakeCore, directory: Path, model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None, name: str = "a", **options: object,
    ) -> None:  # fmt: skip
        self.core, self.directory, self.name = core, directory, name
        self.model = mlp() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3) if optimizer is None else optimizer
        settings = {"connect_timeout_s": 20.0, "drain_s": 5.0, "checkpoint_every_s": None} | options
        self.learner = Learner(self.model, self.optimizer, core.address, name, checkpoint_dir=directory, **settings)
        self._random = torch.Generator().manual_seed(1)

    def __enter__(self) -> Saving:
        self.learner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.learner.__exit__(kind, None, None)

    def turn(self, times: int = 1) -> None:
        """Takes inner steps."""
        for _ in range(times):
            some = next(self.model.parameters())
            x = torch.randn(16, 16, generator=self._random).to(some.device)
            loss = (self.model(x.to(some.dtype)).float() - x[:, :8].flip(1)).square().mean()
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.learner.step(tokens=10)

    def save(self) -> Path:
        """Takes a step that saves, and waits until the checkpoint is complete. Returns the checkpoint's folder."""
        before = self.learner.stats()
        self.learner.save_checkpoint()
        self.turn()
        self.settle(before.checkpoints + before.checkpoints_failed + 1)
        assert self.learner.stats().checkpoints == before.checkpoints + 1
        return self.folders()[-1]

    def settle(self, ended: int) -> None:
        """Waits until this many saves have ended, without changing the parameters."""

        def done() -> bool:
            self.learner.step(tokens=0)
            stats = self.learner.stats()
            return stats.checkpoints + stats.checkpoints_failed >= ended

        until(done, WAIT_S)

    def merge(self) -> None:
        """Makes the core merge this learner's work, and adopts the result."""
        for fragment in range(self.core.fragments):
            version = self.core.versions[fragment]
            self.core.open(fragment)
            self.until(lambda fragment=fragment: self.core.pending(fragment))
            self.core.merge(fragment)
            self.until(lambda f=fragment, v=version: self.learner.stats().versions[f] > v)

    def until(self, found) -> None:
        def turned() -> bool:
            self.turn()
            return found()

        until(turned, WAIT_S)

    def folders(self) -> list[Path]:
        return sorted((self.directory / self.name).glob("checkpoint-*"))

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def anchors(self) -> dict[str, torch.Tensor]:
        """Returns the run's parameters by name."""
        return {name: anchors(self.core, name, p.shape).to(p.dtype) for name, p in self.model.named_parameters()}


def anchors(core: FakeCore, name: str, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor's values in the run."""
    number = next(n for n, tensor in enumerate(core.layout.tensors) if tensor.name == name)
    flat = np.empty(math.prod(shape), np.float32)
    for fragment in core.layout.fragments:
        for piece in fragment.pieces:
            if piece.tensor == number:
                part = core.theta[fragment.index][piece.offset : piece.offset + piece.length]
                flat[piece.start : piece.start + piece.length] = part
    return torch.from_numpy(flat).view(*shape)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint."""
    tensors = storage.SavedTensors(folder)
    tensors.open()
    return {key: tensors.read_whole(key) for key in tensors.described}


def pause() -> None:
    BREATH.wait(0.05)


def events(said, text: str) -> list[dict]:
    return [each for each in said if text in each["event"]]
