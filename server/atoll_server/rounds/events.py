"""PURE: what the syncer is told, and what it asks for: two closed sets of plain values.

Events come with their time (monotonic seconds) as an argument of `Syncer.on`. Effects are carried out in the
order in which they are returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Key(NamedTuple):
    """Names one contribution within a generation of a run; a tuple, since it is hashed and sorted all the time."""

    learner: str
    incarnation: int
    fragment: int
    seq: int

    def __str__(self) -> str:
        return f"{self.learner}/{self.incarnation}/{self.fragment}/{self.seq}"


# ------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Joined:
    """A learner is known now, or known again; one that was restarted has a higher incarnation."""

    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A learner reported: inner steps of this incarnation so far."""

    learner: str
    steps: int
    paused: bool


@dataclass(frozen=True, slots=True)
class Declined:
    """A learner has nothing for this round."""

    learner: str
    fragment: int
    cycle: int
    reason: str


@dataclass(frozen=True, slots=True)
class Contributed:
    """A contribution is whole, checked and durable."""

    key: Key
    cycle: int
    base_version: int
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge that the syncer asked for is durable and published."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """A learner trains on from this version of the fragment."""

    learner: str
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Gone:
    """A learner left: nobody waits for it any more. unwanted: why what waits of its work is refused, if it is."""

    learner: str
    unwanted: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """An operator paused the run, or lets it go on."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


Event = Joined | Heard | Declined | Contributed | Merged | Adopted | Gone | Paused | Ticked

# ------------------------------------------------------------------------------------------------- effects


class Cause(StrEnum):
    """Why a round ends."""

    EVERYBODY = "everybody"  # every live learner has answered
    GRACE = "grace"  # a quorum has, and the grace window is over
    DEADLINE = "deadline"
    NOBODY = "nobody"  # was heard of for so long that anybody is waited for
    LEFT = "left"  # is everybody
    LATE = "late"  # no round: what came after its own is merged, where no grace window waits


@dataclass(frozen=True, slots=True)
class Share:
    """One contribution's part in a merge; the weights of a merge sum to one, or less: see FragmentRounds.settle."""

    key: Key
    weight: float
    staleness: float  # outer steps since its base version, see FragmentRounds.age


@dataclass(frozen=True, slots=True)
class Refusal:
    """A contribution that will not be merged. drop: its learner gives up the outstanding work it came from."""

    key: Key
    reason: str
    drop: bool


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Tell every learner that this fragment's turn has come."""

    fragment: int
    cycle: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Combine these (sorted by key) into `version`, make that durable, publish it, then say Merged.

    age: of that version, see FragmentRounds. quorum_at: when the quorum was there, on the clock of the events; None: it
    never was.
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
    """Make these ends durable, then tell their learners."""

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
