"""PURE: the entries of a run's journal: a closed set of what can happen, as plain values.

The code that makes something happen records it once, after it is durable where it must be. An entry says what happened;
its time is an argument of `Journal.record`. Subscribers are `match` statements that name every kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from atoll_server.access.refusals import Refused
from atoll_server.rounds.syncer_events import ContributionKey, Lapse, Merge
from atoll_server.storage.rows import FateRow

# ------------------------------------------------------------------------------------------------- the run


class OfTheRun:
    """Entries about the run as a whole."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Started(OfTheRun):
    """A core process is ready to serve the run."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Restored(OfTheRun):
    """A generation is served for the first time. It began when an operator restored this checkpoint."""

    checkpoint: int
    generation: int


@dataclass(frozen=True, slots=True)
class TakenUp(OfTheRun):
    """A shard has its state back from the ledger. accepted, merged, refused: all contributions so far."""

    merges: int
    pending: int
    deleted_files: int
    accepted: int
    merged: int
    refused: int


@dataclass(frozen=True, slots=True)
class FirstParameters(OfTheRun):
    """The run has its first parameters: they are durable."""

    parameters: int
    fragments: int


@dataclass(frozen=True, slots=True)
class FirstParametersRefused(OfTheRun):
    """First parameters were not accepted. by_disk: the core's disk is the cause, not the sender."""

    detail: str
    by_disk: bool = False


@dataclass(frozen=True, slots=True)
class PauseChanged(OfTheRun):
    """An operator paused the run, or let it go on: then the reason is empty."""

    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotTaken(OfTheRun):
    """A snapshot is durable. merges: of all its fragments, since the run began."""

    number: int
    merges: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotFailed(OfTheRun):
    """A snapshot could not be written. Nothing is lost: the ledger and the spool hold everything."""

    error: str


@dataclass(frozen=True, slots=True)
class Trouble(OfTheRun):
    """An operator should act. about: the same for as long as the trouble lasts, while figures in the text change."""

    about: str
    text: str


# ------------------------------------------------------------------------------------------------- learners


class OfLearners:
    """Entries about one learner."""

    __slots__ = ()


class Arrival(Enum):
    """Which process a Join came from."""

    NEW = "the first of its name"
    RESTARTED = "another one than before"
    AGAIN = "the same as before"


@dataclass(frozen=True, slots=True)
class Joined(OfLearners):
    """A process may speak for a name. by: what its certificate says; state: of JoinReply."""

    learner: str
    region: str
    incarnation: int
    arrival: Arrival
    down_s: float  # before this incarnation joined
    by: str
    state: int


@dataclass(frozen=True, slots=True)
class Left(OfLearners):
    """A learner said good-bye."""

    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Evicted(OfLearners):
    """An operator sent a learner away."""

    learner: str
    reason: str


@dataclass(frozen=True, slots=True)
class Readmitted(OfLearners):
    """An evicted learner may join again."""

    learner: str


@dataclass(frozen=True, slots=True)
class Silenced(OfLearners):
    """A learner makes no steps. Found by looking, see `run.watch`."""

    learner: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class Recovered(OfLearners):
    """A learner that was silent trains again. Found by looking."""

    learner: str


# ------------------------------------------------------------------------------------------------- callers


class OfCallers:
    """Entries about a call."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JoinRefused(OfCallers):
    """A process may not join. learner: the name that it gave."""

    learner: str
    peer: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class SessionRefused(OfCallers):
    """A call came without a valid session of the learner that it names."""

    learner: str
    peer: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class CallLimited(OfCallers):
    """A call was ended by a limit, see `security.quotas`."""

    method: str
    peer: str
    detail: str


@dataclass(frozen=True, slots=True)
class OperatorRefused(OfCallers):
    """A caller is no operator. asked: the action; empty: it only wanted to read."""

    asked: str
    peer: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class OperatorActed(OfCallers):
    """An operator may do this, and it begins. operator: empty without tokens. what: its arguments."""

    action: str
    operator: str
    peer: str
    what: Mapping[str, str]


# ------------------------------------------------------------------------------------------------- contributions


class OfContributions:
    """Entries about one contribution."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class UploadBegan(OfContributions):
    """A stream of a contribution was admitted; there may be several. received: frames that are here already."""

    key: ContributionKey
    cycle: int
    received: int


@dataclass(frozen=True, slots=True)
class TurnedAway(OfContributions):
    """A contribution was refused before it was whole: the ledger does not know it."""

    learner: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class Clamped(OfContributions):
    """A contribution declares more than its learner can have trained: less of it counts."""

    learner: str
    tokens: int
    steps: int
    counted_tokens: int
    counted_steps: int


@dataclass(frozen=True, slots=True)
class Acknowledged(OfContributions):
    """A contribution is durable, and waits for its merge. cycle: of the round that it answers."""

    key: ContributionKey
    cycle: int


@dataclass(frozen=True, slots=True)
class ArrivalRefused(OfContributions):
    """A contribution came whole and was refused at once. Its stream is told; that is durable."""

    fate: FateRow
    cycle: int


@dataclass(frozen=True, slots=True)
class PendingRefused(OfContributions):
    """An acknowledged contribution will not be merged after all. That is durable."""

    fate: FateRow


# ------------------------------------------------------------------------------------------------- rounds


class OfRounds:
    """Entries about one round."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RoundOpened(OfRounds):
    """Learners are asked for their work on a fragment."""

    fragment: int
    cycle: int


@dataclass(frozen=True, slots=True)
class Declined(OfRounds):
    """A learner has nothing for a round."""

    learner: str
    fragment: int
    cycle: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoundClosed(OfRounds):
    """A round closed, or late contributions are merged without one: the merge begins."""

    merge: Merge


@dataclass(frozen=True, slots=True)
class RoundLapsed(OfRounds):
    """A round closed with nothing to merge."""

    lapse: Lapse


@dataclass(frozen=True, slots=True)
class MergeComputed(OfRounds):
    """The values of a merge are known; they are not durable yet."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Published(OfRounds):
    """A merge is durable, and learners may fetch it. size_bytes: of its update; tokens: of the run at this moment."""

    merge: Merge
    size_bytes: int
    run_tokens: int
    voided_tokens: int


@dataclass(frozen=True, slots=True)
class Adopted(OfRounds):
    """A learner trains on from this version of a fragment."""

    learner: str
    fragment: int
    version: int


Entry = (
    Started
    | Restored
    | TakenUp
    | FirstParameters
    | FirstParametersRefused
    | PauseChanged
    | SnapshotTaken
    | SnapshotFailed
    | Trouble
    | Joined
    | Left
    | Evicted
    | Readmitted
    | Silenced
    | Recovered
    | JoinRefused
    | SessionRefused
    | CallLimited
    | OperatorRefused
    | OperatorActed
    | UploadBegan
    | TurnedAway
    | Clamped
    | Acknowledged
    | ArrivalRefused
    | PendingRefused
    | RoundOpened
    | Declined
    | RoundClosed
    | RoundLapsed
    | MergeComputed
    | Published
    | Adopted
)
