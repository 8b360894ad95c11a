"""What a fleet is made of: islands, the work of their learners, and where each learner stands."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Protocol

from atoll_server.rounds import events as ev


@dataclass(frozen=True, slots=True)
class Island:
    """One learner to be. Times in seconds, rates in bits a second, one way each.

    jitter: relative standard deviation of a step's time. between_failures_s: mean, of a Poisson process.
    """

    name: str
    step_s: float = 1.0
    tokens: int = 1  # of a step
    jitter: float = 0.0
    up_bits_s: float = math.inf
    down_bits_s: float = math.inf
    delay_s: float = 0.0
    between_failures_s: float = math.inf
    repair_s: float = 0.0
    joins_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """A contribution as it was taken. size_bytes: on the wire."""

    tokens: int
    steps: int
    base_version: int
    size_bytes: float


@dataclass(frozen=True, slots=True)
class Published:
    """A new version. anchor: whatever `Work.adopt` is to be given of it."""

    fragment: int
    version: int
    size_bytes: float
    anchor: object


class Work(Protocol):
    """What the learners do, and what a merge does with it. Learners are named."""

    def begin(self, learner: str) -> None:
        """A process starts: it has the newest published parameters, and nothing outstanding."""

    def train(self, learner: str) -> None:
        """One inner step."""

    def take(self, learner: str, fragment: int, seq: int) -> Taken | None:
        """What was trained of a fragment since its anchor; None: nothing."""

    def merge(self, effect: ev.Merge) -> Published:
        """The merge."""

    def adopt(self, learner: str, published: Published, *, merged: bool, drop: bool) -> None:
        """A newer anchor. merged: what is in flight is in it; drop: what is outstanding is given up."""


@dataclass(slots=True)
class Ready:
    """A version that waits for its learner's next step boundary."""

    published: Published
    merged: bool
    drop: bool


@dataclass(slots=True)
class Account:
    """Of one learner, in seconds of the run. blocked: waiting for an adoption, when steps wait for them."""

    steps: int = 0
    trained_s: float = 0.0
    blocked_s: float = 0.0
    down_s: float = 0.0
    staleness: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Learner:
    """Where one stands. waits: for an adoption. due: cycles of fragments. flying: when each was taken, in steps."""

    island: Island
    random: random.Random
    incarnation: int = 0
    steps: int = 0
    seq: int = 0
    alive: bool = True
    leaving: bool = False
    left: bool = False
    waits: bool = False  # for an adoption
    step_s: float = 0.0  # of the step that runs
    boundary_at: float = 0.0  # the newest, or the next
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    ready: dict[int, Ready] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)  # fragment -> cycle
    flying: dict[int, int] = field(default_factory=dict)  # fragment -> step at which it was taken
    account: Account = field(default_factory=Account)
