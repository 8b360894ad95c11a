"""PURE: simulates a fleet's work without training. It tracks only sizes, steps and versions, so it simulates days in
seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll_server.rounds import syncer_events as ev

from atoll_forecast.fleet.learners import Published, SentContribution


@dataclass(slots=True)
class _Place:
    """The state of one fragment at one learner, as in atoll.fragments.adoption.Track with "rebase"."""

    base_version: int = 0
    steps_from: int = 0
    flying: int = 0  # steps of the contribution in flight


@dataclass(slots=True)
class _Process:
    places: list[_Place]
    steps: int = 0


@dataclass(slots=True)
class Schedule:
    """A `Work` that counts steps and versions, without parameters. sizes: coded bytes of each fragment, each way.
    tokens: tokens per step, by learner."""

    sizes: Sequence[float]
    tokens: dict[str, int]
    merged: dict[str, float] = field(default_factory=dict)  # merged inner steps by learner, in steps of the whole model
    _processes: dict[str, _Process] = field(default_factory=dict)
    _versions: dict[int, int] = field(default_factory=dict)
    _steps: dict[ev.ContributionKey, int] = field(default_factory=dict)

    @property
    def merged_steps(self) -> float:
        """The merged inner steps of all learners, in steps of the whole model."""
        return sum(self.merged.values())

    def begin(self, learner: str) -> None:
        places = [_Place(self._versions.get(fragment, 0)) for fragment in range(len(self.sizes))]
        self._processes[learner] = _Process(places)

    def train(self, learner: str) -> None:
        self._processes[learner].steps += 1

    def take(self, learner: str, fragment: int, seq: int) -> SentContribution | None:
        process = self._processes[learner]
        place = process.places[fragment]
        steps = process.steps - place.steps_from
        if not steps:
            return None
        place.flying = steps
        self._steps[ev.ContributionKey(learner, 0, fragment, seq)] = steps
        return SentContribution(steps * self.tokens[learner], steps, place.base_version, self.sizes[fragment])

    def merge(self, effect: ev.Merge) -> Published:
        for share in effect.shares:
            steps = self._steps.pop(ev.ContributionKey(share.key.learner, 0, effect.fragment, share.key.seq))
            name = share.key.learner
            self.merged[name] = self.merged.get(name, 0.0) + steps / len(self.sizes)
        self._versions[effect.fragment] = effect.version
        return Published(effect.fragment, effect.version, self.sizes[effect.fragment], None)

    def adopt(self, learner: str, published: Published, *, merged: bool, drop: bool) -> None:
        process = self._processes[learner]
        place = process.places[published.fragment]
        if merged:
            place.steps_from += place.flying
        if drop:
            place.steps_from = process.steps
        if merged or drop:
            place.flying = 0
        if merged or place.steps_from == process.steps:
            place.base_version = published.version
