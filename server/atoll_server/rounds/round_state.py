"""PURE: one fragment's rounds, with the open round, the learners that answered it and the pending contributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from enum import Enum

from atoll_server.learners.plausibility import parts_counted
from atoll_server.rounds.outer_rule import part_of
from atoll_server.rounds.syncer_events import Cause, ContributionKey, Refusal, Share
from atoll_server.settings import RunSettings

Weigh = Callable[[int, int, float, float], float]  # tokens, steps, staleness, exponent -> weight
AGES = 4096  # number of versions whose age is stored; each older version counts as a whole outer step


class Phase(Enum):
    """Whether a fragment is idle, collects contributions in an open round, or is merging."""

    IDLE = "idle"
    OPEN = "open"
    MERGING = "merging"


@dataclass(frozen=True, slots=True)
class PendingContribution:
    """An acknowledged contribution that waits for its merge."""

    cycle: int
    base_version: int
    tokens: int
    steps: int


@dataclass(slots=True)
class RoundState:
    """One fragment's rounds. Times are monotonic seconds. A new fragment is at version 0 and cycle 0."""

    version: int = 0
    cycle: int = 0
    phase: Phase = Phase.IDLE
    opened_at: float = 0.0
    quorum_at: float | None = None
    closed_at: float | None = None
    adopters: set[str] = field(default_factory=set)  # contributors to the newest version that have not adopted it yet
    declined: dict[str, str] = field(default_factory=dict)
    pending: dict[ContributionKey, PendingContribution] = field(default_factory=dict)
    # by learner: the weight of its last contribution, without the discount for staleness
    usual: dict[str, float] = field(default_factory=dict)
    # by version: its age, which is the number of outer steps from version 0 to this version (see `age`)
    ages: dict[int, float] = field(default_factory=dict)
    asked: int | None = None  # the newest cycle for which this process asked learners to contribute

    def __post_init__(self) -> None:
        self.ages = self.ages or {self.version: float(self.version)}

    def resume(
        self,
        cycle: int,
        synced_at: float,
        ages: dict[int, float],
        pending: Iterable[tuple[ContributionKey, PendingContribution]],
    ) -> None:
        """Restores the rounds after a core restart. Restored contributions count as late.

        synced_at: time of the last merge, in monotonic seconds. ages: age of each version in outer steps, oldest first.
        """
        self.cycle = cycle  # `asked` stays None, since the time until an answer would include the restart
        self.opened_at = synced_at
        self.ages = ages
        self.pending = dict(pending)

    def age(self, version: int) -> float:
        """Returns a version's age, which is the number of outer steps from version 0 to this version.

        A merge of few learners' work adds only a fraction of an outer step.
        """
        near = min(max(version, next(iter(self.ages))), next(reversed(self.ages)))
        return self.ages[near] + (version - near)  # versions without a stored age count as 1

    def staleness(self, base_version: int) -> float:
        """Returns the number of outer steps from a base version to the newest version."""
        return round(self.age(self.version) - self.age(base_version), 6)  # four quarters are then exactly 1

    def decline(self, learner: str, cycle: int, reason: str) -> None:
        """Records that a learner has no contribution to the open round. Has no effect if `cycle` has ended."""
        if self.phase is Phase.OPEN and self.cycle == cycle:
            self.declined[learner] = reason

    def answered(self) -> set[str]:
        """Returns the learners that contributed or declined. The round does not wait for these learners."""
        return set(self.declined) | {key.learner for key in self.pending}

    def fresh(self) -> set[str]:
        """Returns the learners that contributed to this round itself. Only these count towards the quorum."""
        return {key.learner for key, waiting in self.pending.items() if waiting.cycle == self.cycle}

    def settle(
        self, counted: Set[str], weigh: Weigh, settings: RunSettings
    ) -> tuple[tuple[Share, ...], tuple[Refusal, ...]]:
        """Removes all pending contributions. Returns the merge's shares and the refusals of overly stale contributions.

        counted: learners whose work together makes up a whole outer step. weigh: function that returns a contribution's
        weight.

        Each weight is divided by the total weight that all counted learners would have without staleness. A merge of
        few learners' work, or of late contributions, is therefore a small step. For a learner that has not answered,
        the total includes its last weight, limited to the largest weight in this merge. `learners.plausibility` limits
        a weight that is far above the others.
        """
        silent = counted - self.answered()
        taken: list[tuple[ContributionKey, float, float]] = []
        refusals: list[Refusal] = []
        on_time: dict[str, float] = {}
        for key, waiting in sorted(self.pending.items()):
            staleness = self.staleness(waiting.base_version)
            if staleness > settings.max_staleness:
                text = (
                    f"staleness {staleness:.3g} is above the limit {settings.max_staleness} (--max-staleness): "
                    "the learner drops this work and fetches the whole fragment"
                )
                refusals.append(Refusal(key, text, True))
                continue
            sent = (waiting.tokens, waiting.steps)
            on_time[key.learner] = on_time.get(key.learner, 0.0) + weigh(*sent, 0, settings.staleness_exponent)
            taken.append((key, weigh(*sent, staleness, settings.staleness_exponent), staleness))
        self.pending.clear()
        self.usual.update(on_time)
        known = {name: self.usual[name] for name in counted | on_time.keys() if name in self.usual}
        part = parts_counted(known, settings.weight_limit)
        on_time = {learner: weight * part[learner] for learner, weight in on_time.items()}
        most = max(on_time.values(), default=0.0)
        missing = (min(most, self.usual.get(learner, most)) for learner in silent)
        whole = math.fsum([*on_time.values(), *missing])
        shares = tuple(Share(key, weight * part[key.learner] / whole, staleness) for key, weight, staleness in taken)
        if shares:
            self.ages[self.version + 1] = self.age(self.version) + part_of(share.weight for share in shares)
            oldest = self.ages[self.version + 1] - settings.max_staleness - 1
            while len(self.ages) > AGES or next(iter(self.ages.values())) < oldest:
                del self.ages[next(iter(self.ages))]
        return shares, tuple(refusals)


@dataclass(frozen=True, slots=True)
class StayOpen:
    """The round stays open.

    until: time at which the syncer must decide again, in monotonic seconds. reason: text for people.
    """

    reason: str
    until: float


@dataclass(frozen=True, slots=True)
class CloseNow:
    """The round closes now. reason: text for people."""

    cause: Cause
    reason: str
