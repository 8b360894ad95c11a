"""PURE: the syncer's inputs (events) and outputs (effects), two closed sets of plain values.

`Syncer.on` takes an event and its time in monotonic seconds and returns effects. The shard carries out the effects
in the order in which `Syncer.on` returns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class ContributionKey(NamedTuple):
    """Identifies a contribution within one generation. It is a tuple, because keys are often hashed and sorted."""

    learner: str
    incarnation: int
    fragment: int
    seq: int

    def __str__(self) -> str:
        return f"{self.learner}/{self.incarnation}/{self.fragment}/{self.seq}"


# ------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Joined:
    """A learner joined or rejoined. A restarted learner has a higher incarnation."""

    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Reported:
    """A learner sent a report. steps: inner steps of this incarnation so far."""

    learner: str
    steps: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Declined:
    """A learner reported that it has no contribution to this round. reason: text for people."""

    learner: str
    fragment: int
    cycle: int
    reason: str


@dataclass(frozen=True, slots=True)
class Contributed:
    """A contribution is complete, checked and durable."""

    key: ContributionKey
    cycle: int
    base_version: int
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge that the syncer requested is durable and published."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """A learner adopted this version of the fragment."""

    learner: str
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Left:
    """A learner left or was evicted.

    refuse_reason: reason for refusing its pending contributions; empty to keep them.
    """

    learner: str
    refuse_reason: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """An operator paused or resumed the run."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed without another event. The syncer checks whether rounds must close or open."""


SyncerEvent = Joined | Reported | Declined | Contributed | Merged | Adopted | Left | Paused | Ticked


def concerned(event: SyncerEvent) -> int | None:
    """Returns the only fragment whose round may close because of an event, or None if several may."""
    match event:
        case Declined():
            return event.fragment
        case Contributed():
            return event.key.fragment
        case _:
            return None


# ------------------------------------------------------------------------------------------------- effects


class Cause(StrEnum):
    """The cause of a round's end, as the timeline shows it."""

    ALL_ANSWERED = "all_answered"  # every live learner has answered
    GRACE = "grace"  # a quorum has answered, and the grace window has passed
    DEADLINE = "deadline"
    ALL_SILENT = "all_silent"  # no learner is expected to contribute, since all are silent
    LEFT = "left"  # all learners have left
    LATE = "late"  # late contributions were merged without a round, because there is no grace window


@dataclass(frozen=True, slots=True)
class Share:
    """One contribution's share of a merge. The weights of a merge sum to at most 1 (see RoundState.settle)."""

    key: ContributionKey
    weight: float
    staleness: float  # outer steps since the contribution's base version


@dataclass(frozen=True, slots=True)
class Refusal:
    """A contribution that will not be merged. drop: whether its learner discards the contribution's work."""

    key: ContributionKey
    reason: str
    drop: bool


@dataclass(frozen=True, slots=True)
class OpenRound:
    """The shard must ask every learner for a contribution to this fragment."""

    fragment: int
    cycle: int


@dataclass(frozen=True, slots=True)
class Merge:
    """The shard must compute `version` from these shares, make it durable, publish it and then report Merged.

    shares: the shares, sorted by key. age: the age of `version` in outer steps (see RoundState.age). quorum_at: time at
    which the quorum was reached, in monotonic seconds; None if it was not reached.
    """

    fragment: int
    version: int
    cycle: int
    shares: tuple[Share, ...]
    refusals: tuple[Refusal, ...]
    age: float
    quorum_at: float | None
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The shard must make these refusals durable and then notify the learners."""

    fragment: int
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Lapse:
    """The round ended without a merge."""

    fragment: int
    cycle: int
    cause: Cause
    reason: str


Effect = OpenRound | Merge | Refuse | Lapse
