"""A started learner without a core. The test controls its boundaries, and reads its contributions."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from atoll import Learner
from atoll.fragments.adoption import Fate, PreparedAnchor, PseudoGradient
from atoll.fragments.exchange import Submission
from atoll.model.parameters import Optimizers, Parameters
from atoll.ranks.division import undivided
from atoll.ranks.rank_group import ALONE, RankGroup
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, plan
from torch import nn

torch.set_num_threads(1)


class Deaf:
    """An agent without a core."""

    failure = None

    run_codec = Codec.FLOAT32

    def __init__(self) -> None:
        self.taken: list[PseudoGradient] = []

    def submit(self, taken: Submission) -> None:
        if not taken.received:  # like `Sender`
            taken.received = True
            assert taken.outstanding.coded is not None  # like `Sender`, since only few may wait to be coded
            self.taken.append(taken.outstanding)


def mlp(dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device, dtype)


class Watched:
    """A learner that trains a model on a simple task, and adopts simulated work of others.

    step: the optimizer's step and related code. others: size of an adoption relative to the anchors.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, step: Callable[[], object] | None = None, *,
        fragments: int = 2, others: float = 0.1, ranks: RankGroup = ALONE, **options: object,
    ) -> None:  # fmt: skip
        self.model, self.others, self._fragments, self._ranks = model, others, fragments, ranks
        self.learner = Learner(model, optimizer, "127.0.0.1:1", "a", drain_s=0.0, **options)
        self.agent = self.learner._agent = Deaf()
        self._step = step or (optimizer[0] if isinstance(optimizer, list) else optimizer).step
        self._random = torch.Generator().manual_seed(1)
        self._version = 1

    def __enter__(self) -> Watched:
        learner = self.learner
        parameters = learner._parameters = Parameters(
            self.model, learner._optimizer, learner._unshared, learner._copies
        )
        learner._ranks, learner._thread = self._ranks, threading.current_thread()
        flat = [parameter.detach().float().reshape(-1).cpu().numpy() for parameter in parameters.values]
        self.layout: Layout = plan(parameters.tensors, self._fragments)
        first = [
            np.concatenate([flat[p.tensor][p.start : p.start + p.length] for p in fragment.pieces])
            for fragment in self.layout.fragments
        ]
        anchors = [PreparedAnchor(number, 1, anchor, Fate()) for number, anchor in enumerate(first)]
        learner._take_over(parameters, self.layout, self.agent, undivided(self.layout), anchors)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.learner._exchange.wait_settled = lambda *_, **__: False
        self.learner._exchange._ended = True
        self.learner.__exit__(kind, None, None)

    def gradient(self) -> float:
        """Computes a gradient of the task. Returns the loss."""
        some = next(self.model.parameters())
        x = torch.randn(16, 16, generator=self._random).to(some.device)
        loss = (self.model(x.to(some.dtype)).float() - x[:, :8].flip(1)).square().mean()
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        return loss.item()

    def turn(self, times: int = 1) -> None:
        """Takes inner steps."""
        for _ in range(times):
            self.gradient()
            self._step()
            self.learner.step(tokens=10)

    def train_and_ask(self, times: int) -> None:
        """Takes inner steps, and opens rounds of all fragments before each."""
        for _ in range(times):
            self.ask()
            self.turn()

    def settle(self) -> None:
        """Takes step boundaries without training, until late rows of the watch have arrived."""
        for _ in range(8):
            self.learner.step(tokens=0)

    def adopt(self) -> None:
        """Offers new anchors of all fragments for the next boundary."""
        self._version += 1
        for fragment, track in enumerate(self.learner._boundary.local.tracks):
            random = np.random.default_rng(self._version * 100 + fragment)
            change = random.standard_normal(len(track.anchor)).astype(np.float32) * np.std(track.anchor) * self.others
            self.learner._exchange.offer(PreparedAnchor(fragment, self._version, track.anchor + change, Fate()))

    def ask(self) -> None:
        """Opens rounds of all fragments for the next boundary."""
        for fragment in range(len(self.layout.fragments)):
            self.learner._exchange.ask(fragment, self._version)

    def rounds(self, turns: int = 60, every: int = 6) -> None:
        """Trains, with regular contributions and adoptions."""
        for turn in range(turns):
            if turn % every == every - 1:
                self.adopt()
            if turn % every == every // 2:
                self.ask()
            self.turn()
            for track in self.learner._boundary.local.tracks:
                if track.flying is not None:
                    track.refused()

    @property
    def abandoned(self) -> float:
        return self.learner.stats().abandoned_tokens

    def distance(self) -> float:
        """Returns the largest distance of a parameter from its anchor."""
        local = self.learner._boundary.local
        return max(
            float(np.abs(local._values.read(number)() - track.anchor).max())
            for number, track in enumerate(local.tracks)
        )
