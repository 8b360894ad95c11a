"""PURE: the syncer's inputs (events) and outputs (effects), two closed sets of plain values.

An event's time, in monotonic seconds, is an argument of `Syncer.on`. The shard carries out effects in the order in
which `Syncer.on` returns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class ContributionKey(NamedTuple):
    """Identifies a contribution within a generation of a run. A tuple, since it is hashed and sorted often."""

    learner: str
    incarnation: int
    fragment: int
    seq: int

    def __str__(self) -> str:
        return f"{self.learner}/{self.incarnation}/{self.fragment}/{self.seq}"


# ------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Joined:
    """A learner joined, or joined again. A restarted learner has a higher incarnation."""

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
    """A learner has no contribution to this round."""

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
    """A learner continues training from this version of the fragment."""

    learner: str
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Left:
    """A learner left, and no round waits for it. refuse_reason: if not empty, its pending work is refused."""

    learner: str
    refuse_reason: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """An operator paused or resumed the run."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    """Only time passed. The syncer checks deadlines, grace windows and the pace."""


SyncerEvent = Joined | Reported | Declined | Contributed | Merged | Adopted | Left | Paused | Ticked

# ------------------------------------------------------------------------------------------------- effects


class Cause(StrEnum):
    """The cause of a round's end, as the timeline shows it."""

    ALL_ANSWERED = "all_answered"  # every live learner has answered
    GRACE = "grace"  # a quorum has answered, and the grace window has passed
    DEADLINE = "deadline"
    ALL_SILENT = "all_silent"  # all learners have been silent for so long that none is expected back
    LEFT = "left"  # all learners have left
    LATE = "late"  # not a round: late contributions are merged separately, since there is no grace window


@dataclass(frozen=True, slots=True)
class Share:
    """One contribution's share of a merge. A merge's weights sum to at most 1, see RoundState.settle."""

    key: ContributionKey
    weight: float
    staleness: float  # outer steps since its base version, see RoundState.age


@dataclass(frozen=True, slots=True)
class Refusal:
    """A contribution that will not be merged. drop: whether its learner discards the work that it contains."""

    key: ContributionKey
    reason: str
    drop: bool


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Ask every learner for a contribution to this fragment."""

    fragment: int
    cycle: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Combine these shares (sorted by key) into `version`, make it durable, publish it, then report Merged.

    age: the age of `version` in outer steps, see RoundState. quorum_at: time when the quorum was reached, on the
    events' clock; None if it was not reached.
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
    """Make these refusals durable, then tell their learners."""

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
