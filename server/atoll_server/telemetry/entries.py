"""PURE: the entries of a run's journal, which are a closed set of plain values.

The code that causes a change records one entry. A change that must be durable is made durable before its entry is
recorded. An entry's time is an argument of `Journal.record`. Subscribers handle every kind in a `match` statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from atoll_server.access.refusals import Refused
from atoll_server.ledger.rows import FateRow
from atoll_server.rounds.syncer_events import ContributionKey, Lapse, Merge

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
    """A core serves a new generation for the first time.

    backup: time of the restored backup; empty for a checkpoint.
    """

    checkpoint: int
    generation: int
    backup: str = ""


@dataclass(frozen=True, slots=True)
class TakenUp(OfTheRun):
    """A shard restored its state from the ledger. accepted, merged, refused: number of contributions so far."""

    merges: int
    pending: int
    deleted_files: int
    accepted: int
    merged: int
    refused: int


@dataclass(frozen=True, slots=True)
class InitialParameters(OfTheRun):
    """The initial parameters of the run are durable."""

    parameters: int
    fragments: int


@dataclass(frozen=True, slots=True)
class InitialParametersRefused(OfTheRun):
    """Initial parameters were not accepted. by_disk: whether the core's disk, not the sender, is the cause."""

    detail: str
    by_disk: bool = False


@dataclass(frozen=True, slots=True)
class PauseChanged(OfTheRun):
    """An operator paused or resumed the run. The reason is empty if the run was resumed."""

    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotTaken(OfTheRun):
    """A snapshot, or a checkpoint of several shards, is durable.

    merges: number of merges of its fragments since the run began. part: whether it is a snapshot of one of several
    shards and thus not a checkpoint.
    """

    number: int
    merges: int
    size_bytes: int
    part: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotFailed(OfTheRun):
    """A snapshot could not be written. No work is lost, since the ledger and the spool contain all work."""

    error: str


@dataclass(frozen=True, slots=True)
class Trouble(OfTheRun):
    """A problem that an operator should fix. about: identifier of the problem, since figures in the text may change."""

    about: str
    text: str


# ------------------------------------------------------------------------------------------------- learners


class OfLearners:
    """Entries about one learner."""

    __slots__ = ()


class Arrival(Enum):
    """Whether a joined process is the first with its name, a new process or a process that joins again.

    The value is text for people.
    """

    NEW = "the first process with this name"
    RESTARTED = "a new process with a known name"
    AGAIN = "the same process as before"


@dataclass(frozen=True, slots=True)
class Joined(OfLearners):
    """A learner's process joined. by: the name in its certificate. state: the state in its JoinReply."""

    learner: str
    region: str
    incarnation: int
    arrival: Arrival
    down_s: float  # seconds without a process before this incarnation joined
    by: str
    state: int


@dataclass(frozen=True, slots=True)
class Left(OfLearners):
    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Evicted(OfLearners):
    learner: str
    reason: str


@dataclass(frozen=True, slots=True)
class Readmitted(OfLearners):
    learner: str


@dataclass(frozen=True, slots=True)
class Silenced(OfLearners):
    """A learner has stopped taking steps (see `run.watch`). silent_s: seconds since its last step."""

    learner: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class Recovered(OfLearners):
    """A learner that was silent takes steps again (see `run.watch`)."""

    learner: str


# ------------------------------------------------------------------------------------------------- fronts


class OfFronts:
    """Entries about one front."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FrontConnected(OfFronts):
    """A front announced itself. silent_s: seconds of the silence that has ended; 0 if the front is new."""

    front: str
    region: str
    silent_s: float


@dataclass(frozen=True, slots=True)
class FrontSilenced(OfFronts):
    """A front has stopped sending messages. learners: number of learners behind it."""

    front: str
    learners: int


# ------------------------------------------------------------------------------------------------- callers


class OfCallers:
    """Entries about a call."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JoinRefused(OfCallers):
    """A Join was refused. learner: the name in the Join."""

    learner: str
    peer: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class SessionRefused(OfCallers):
    """A call had no valid session for the learner named in the call."""

    learner: str
    peer: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class CallLimited(OfCallers):
    """A limit ended a call (see `access.quotas`)."""

    method: str
    peer: str
    detail: str


@dataclass(frozen=True, slots=True)
class OperatorRefused(OfCallers):
    """A call that only operators may make was refused. asked: the requested action; empty for a read."""

    asked: str
    peer: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class OperatorActed(OfCallers):
    """An operator's action has ended. operator: name of the operator; empty if operators have no tokens.

    what: the action's arguments. status, detail: the error of a failed action; empty if the action succeeded.
    """

    action: str
    operator: str
    peer: str
    what: Mapping[str, str]
    status: str = ""
    detail: str = ""

    @property
    def outcome(self) -> dict[str, str]:
        """The status and detail of a failed action; empty if the action succeeded."""
        return {"status": self.status, "detail": self.detail} if self.status else {}


# ------------------------------------------------------------------------------------------------- contributions


class OfContributions:
    """Entries about one contribution."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class UploadBegan(OfContributions):
    """A stream of a contribution was admitted. received: number of frames that had already arrived."""

    key: ContributionKey
    cycle: int
    received: int


@dataclass(frozen=True, slots=True)
class TurnedAway(OfContributions):
    """A contribution was refused before its upload was complete, so the ledger does not contain it."""

    learner: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class Clamped(OfContributions):
    """A contribution declares more work than its learner could have done, so only part of the work counts."""

    learner: str
    tokens: int
    steps: int
    counted_tokens: int
    counted_steps: int


@dataclass(frozen=True, slots=True)
class Acknowledged(OfContributions):
    """A contribution is durable and waits for its merge. cycle: cycle of the round that the contribution answers."""

    key: ContributionKey
    cycle: int


@dataclass(frozen=True, slots=True)
class ArrivalRefused(OfContributions):
    """A complete contribution was refused immediately. The refusal is durable. The streams get the receipt."""

    fate: FateRow
    cycle: int


@dataclass(frozen=True, slots=True)
class PendingRefused(OfContributions):
    """An acknowledged contribution will not be merged. The refusal is durable."""

    fate: FateRow


# ------------------------------------------------------------------------------------------------- rounds


class OfRounds:
    """Entries about one round."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RoundOpened(OfRounds):
    """A round opened, and learners are asked for contributions to its fragment."""

    fragment: int
    cycle: int


@dataclass(frozen=True, slots=True)
class Declined(OfRounds):
    """A learner declined to contribute to a round."""

    learner: str
    fragment: int
    cycle: int
    reason: str


@dataclass(frozen=True, slots=True)
class RoundClosed(OfRounds):
    """A merge begins: a round closed, or late contributions are merged without a round."""

    merge: Merge


@dataclass(frozen=True, slots=True)
class RoundLapsed(OfRounds):
    """A round closed with nothing to merge."""

    lapse: Lapse


@dataclass(frozen=True, slots=True)
class MergeComputed(OfRounds):
    """A merge was computed. It is not durable yet."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Published(OfRounds):
    """A merge is durable, and learners may fetch its update. size_bytes: the size of the update."""

    merge: Merge
    size_bytes: int
    run_tokens: int
    voided_tokens: int


@dataclass(frozen=True, slots=True)
class Adopted(OfRounds):
    """A learner adopted this version of a fragment."""

    learner: str
    fragment: int
    version: int


Entry = (
    Started | Restored | TakenUp | InitialParameters | InitialParametersRefused | PauseChanged | SnapshotTaken
    | SnapshotFailed | Trouble | Joined | Left | Evicted | Readmitted | Silenced | Recovered | FrontConnected
    | FrontSilenced | JoinRefused | SessionRefused | CallLimited | OperatorRefused | OperatorActed | UploadBegan
    | TurnedAway | Clamped | Acknowledged | ArrivalRefused | PendingRefused | RoundOpened | Declined | RoundClosed
    | RoundLapsed | MergeComputed | Published | Adopted
)  # fmt: skip
