"""Parts of a fleet: the properties and the state of each learner, and the interface to the training."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Protocol

from atoll_server.rounds import syncer_events as ev


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The properties of one learner. Times are in seconds, rates in bits per second. delay_s: one-way delay.

    jitter: relative standard deviation of a step's time. between_failures_s: mean time between the failures of a
    Poisson process.
    """

    name: str
    step_s: float = 1.0
    tokens: int = 1  # tokens per step
    jitter: float = 0.0
    up_bits_s: float = math.inf
    down_bits_s: float = math.inf
    delay_s: float = 0.0
    between_failures_s: float = math.inf
    repair_s: float = 0.0
    joins_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SentContribution:
    """A contribution. size_bytes: its size on the wire."""

    tokens: int
    steps: int
    base_version: int
    size_bytes: float


@dataclass(frozen=True, slots=True)
class Published:
    """A new version of a fragment.

    size_bytes: its size on the wire. anchor: an argument for `Work.adopt`, which the fleet does not read.
    """

    fragment: int
    version: int
    size_bytes: float
    anchor: object


class Work(Protocol):
    """The training of a fleet. The fleet calls these methods in the order of events. `learner` is a learner's name."""

    def begin(self, learner: str) -> None:
        """Starts a learner's process with the newest published parameters and without outstanding work."""

    def train(self, learner: str) -> None:
        """Takes one inner step on a learner."""

    def take(self, learner: str, fragment: int, seq: int) -> SentContribution | None:
        """Returns a fragment's outstanding work as a contribution, or None if there is no such work.

        seq: the contribution's number.
        """

    def merge(self, effect: ev.Merge) -> Published:
        """Merges the contributions that `effect` names into a new version."""

    def adopt(self, learner: str, published: Published, *, merged: bool, drop: bool) -> None:
        """Adopts a newer anchor. merged: whether the anchor includes the contribution in flight. drop: whether to drop
        the outstanding work."""


@dataclass(slots=True)
class Ready:
    """A version that waits for its learner's next step boundary. merged, drop: see `Work.adopt`."""

    published: Published
    merged: bool
    drop: bool


@dataclass(slots=True)
class LearnerTimes:
    """The virtual time of one learner. blocked_s: time spent waiting for adoptions. staleness: staleness of each merged
    contribution."""

    steps: int = 0
    trained_s: float = 0.0
    blocked_s: float = 0.0
    down_s: float = 0.0
    staleness: list[float] = field(default_factory=list)


@dataclass(slots=True)
class FleetLearner:
    """The state of one learner."""

    spec: LearnerSpec
    random: random.Random
    incarnation: int = 0
    steps: int = 0
    seq: int = 0
    alive: bool = True
    leaving: bool = False
    left: bool = False
    waits: bool = False  # whether the learner waits for an adoption
    step_s: float = 0.0  # duration of the current step
    boundary_at: float = 0.0  # time of the current or next step boundary
    up_free_at: float = 0.0
    down_free_at: float = 0.0
    ready: dict[int, Ready] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)  # fragment -> cycle
    flying: dict[int, int] = field(default_factory=dict)  # fragment -> step at which the contribution was taken
    account: LearnerTimes = field(default_factory=LearnerTimes)
