"""Learners that merge with each other without a core, and adopt the results as in a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from atoll.fragments.adoption import Fate, PreparedAnchor
from atoll.fragments.segments import Coded, FragmentShape, change
from atoll_server.rounds.outer_rule import OuterRule
from atoll_wire.layout.frame_spans import Codec
from torch import nn

from tests.learner.watched import Watched

RULE = OuterRule(0.5, 0.85, Codec.FLOAT32)  # a core's defaults
EVERY = 4  # mean number of steps between a fragment's rounds
ANSWERS = 0.7  # share of rounds that a learner answers in time


@dataclass
class Kind:
    """A model, its loss, and its optimizer."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    fragments: int = 2


class Merging:
    """Two started learners of one kind, which step in turn."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._kind, self._random = kind, np.random.default_rng(seed)
        self.members: list[Watched] = []
        for _ in range(2):
            torch.manual_seed(seed)  # both begin with the run's parameters
            model = kind.model()
            self.members.append(Watched(model, kind.optimizer(model), fragments=kind.fragments))
        torch.manual_seed(seed + 1)

    def __enter__(self) -> Merging:
        for member in self.members:
            member.__enter__()
        first = [track.anchor for track in self.members[0].learner._boundary.local.tracks]
        self._anchors = [anchor.copy() for anchor in first]
        self._momentum = [np.zeros_like(anchor) for anchor in first]
        self._versions = [1] * len(first)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for member in self.members:
            member.__exit__(kind)

    def turn(self, times: int = 1) -> None:
        """Takes inner steps of both learners, with rounds in between."""
        for _ in range(times):
            for fragment in range(len(self._anchors)):
                if self._random.random() < 1 / EVERY:
                    self._round(fragment)
            self._steps()

    def _steps(self) -> None:
        for member in self.members:
            member.model.zero_grad(set_to_none=True)
            self._kind.loss(member.model).backward()
            member._step()
            member.learner.step(tokens=4)

    def _round(self, fragment: int) -> None:
        """Takes contributions, merges them immediately, and offers the new anchor at a later step."""
        asked = [m for m in self.members if self._random.random() < ANSWERS]
        for member in asked:
            member.agent.taken.clear()
            member.learner._exchange.ask(fragment, self._versions[fragment])
        self._steps()
        given = [(m, m.agent.taken[-1].coded) for m in asked if m.agent.taken]
        if given:
            self._merge(fragment, [coded for _, coded in given])
            fates = {id(member): Fate(coded) for member, coded in given}
            self._offer(fragment, [fates.get(id(member), Fate()) for member in self.members])

    def _merge(self, fragment: int, given: Sequence[Coded]) -> None:
        shape = self.members[0].learner._boundary.local.tracks[fragment].shape
        zero, change = np.zeros(shape.length, np.float32), np.zeros(shape.length, np.float32)
        for coded in given:
            change += values(zero, coded, shape) / len(self.members)
        decay, push = RULE.decay_and_push(len(given) / len(self.members))
        self._momentum[fragment] = decay * self._momentum[fragment] + change
        self._anchors[fragment] = (
            self._anchors[fragment] - RULE.lr * (change + push * self._momentum[fragment])
        ).astype(np.float32)
        self._versions[fragment] += 1

    def _offer(self, fragment: int, fates: Sequence[Fate]) -> None:
        anchor, version = self._anchors[fragment], self._versions[fragment]
        for member, fate in zip(self.members, fates, strict=True):
            member.learner._exchange.offer(PreparedAnchor(fragment, version, anchor.copy(), fate))

    def back(self, anchors: Sequence[np.ndarray]) -> None:
        """Gives the learners these anchors, like a core that was restored from a backup."""
        self._anchors = [anchor.copy() for anchor in anchors]
        self._momentum = [np.zeros_like(anchor) for anchor in anchors]
        for fragment in range(len(anchors)):
            self._versions[fragment] += 1
            self._offer(fragment, [Fate(drop=True)] * 2)

    @property
    def anchors(self) -> list[np.ndarray]:
        """Returns the current anchors of all fragments."""
        return [anchor.copy() for anchor in self._anchors]


def values(zero: np.ndarray, coded: Coded, shape: FragmentShape) -> np.ndarray:
    """Returns the values of a coded contribution."""
    return change(zero, zero, None, coded, shape)
