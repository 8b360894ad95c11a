"""The models of the JSON API, for the page, the OpenAPI schema and other programs.

Durations are in seconds and sizes in bytes. Times are seconds since 1970 on the core's clock. null stands for an
unknown value.
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from atoll_wire.contract import LearnerState, LinkState
from pydantic import BaseModel

T = TypeVar("T")

Outcome = Literal["open", "merging", "merged", "lapsed"]
Kind = Literal[
    "core", "joined", "back", "silent", "left", "evicted", "refused", "checkpoint", "paused", "resumed", "trouble",
    "unreachable", "reachable",
]  # fmt: skip


class Page(BaseModel, Generic[T]):
    """A page of a longer list. total: number of all matching items."""

    total: int
    offset: int
    items: list[T]


class Goodput(BaseModel):
    """Useful share of provisioned learner-seconds. recent: over the last five minutes. lost_s: lost time by cause."""

    ratio: float
    recent: float | None
    useful_s: float
    provisioned_s: float
    lost_s: dict[str, float]


class Counts(BaseModel):
    """Numbers of contributions by fate."""

    accepted: int
    merged: int
    pending: int
    refused: int
    turned_away: int


class Wire(BaseModel):
    """Payload sizes. whole_bytes: whole fragments and initial parameters. up_bits, down_bits: bits per parameter."""

    up_bytes: int
    down_bytes: int
    whole_bytes: int
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    up_bits: float | None
    down_bits: float | None


class Cost(BaseModel):
    """The cost of the WAN at a price per GB (1e9 bytes), in both directions. budget_gb: GB per month; null: no budget.

    per_day, gb_per_month: cost and volume at the last hour's rate; null in the dashboard's first ten minutes.
    known_in_s: seconds until they are known; 0 if they are known.
    """

    price_per_gb: float
    total: float
    per_day: float | None
    gb_per_month: float | None
    known_in_s: float
    budget_gb: float | None


class Units(BaseModel):
    """The data units of a dataset. Counts cover all epochs.

    units: number of units in an epoch. epoch: epoch of the next unit, from 0; equals `epochs` after the last unit.
    leased: units that were handed out and are neither consumed nor returned. returned: units that wait to be handed out
    again. repeated: merged work on units that were trained again, in units. lost: parts of consumed units that were not
    merged, in units.
    """

    name: str
    units: int
    epochs: int
    epoch: int
    consumed: int
    leased: int
    returned: int
    repeated: float
    lost: float


class Restored(BaseModel):
    """A restore of the run to a checkpoint.

    backup_at: when the restored backup was taken; null: the run's own checkpoint was restored. undone_tokens: trained
    tokens that no longer count.
    """

    checkpoint: int
    at: float
    backup_at: float | None
    undone_tokens: int


class Run(BaseModel):
    """The state of the run at time `at` on the core's clock.

    reachable: whether the core answered the last poll. problem: why the last poll failed, on one line. age_s: age of
    the core's answer. paused: who paused the run and why; "": the run is not paused. actions: whether the core accepts
    operator tokens. actions_problem: why operator actions are not possible, and the fix. learners: number of learners
    in each state. loss: mean of the learners that train; if none does, the last loss of the one that trained last.
    lost_window_s: span of the lost time of dots, at most an hour. dashboard_s: seconds since the dashboard's start.
    """

    reachable: bool
    problem: str
    age_s: float
    at: float
    run: str
    generation: int
    restored: Restored | None  # the restore that began this generation; null: this is the first generation
    epoch: int
    uptime_s: float
    wall_s: float
    parameters: int
    fragments: int
    inner_steps: int
    overlap_steps: float
    codec: str
    paused: str
    troubles: list[str]
    goodput: Goodput
    tokens_trained: int
    tokens_merged: float
    total_tokens: int  # the run's target; 0: not known
    tokens_per_s: float | None
    loss: float | None
    merges: int
    contributions: Counts
    datasets: list[Units]
    wire: Wire
    cost: Cost
    learners: dict[LearnerState, int]
    actions: bool
    actions_problem: str
    lost_window_s: float
    dashboard_s: float


class Dot(BaseModel):
    """A learner on the map. lost_s: the time that it lost in the last `lost_window_s` of Run."""

    learner: str
    state: LearnerState
    since: float | None
    uploading: bool
    lost_s: float


class Link(BaseModel):
    """The link of a front, or of a learner that calls the core directly.

    learners: number of learners behind it. learner_names: at most 16 of their names, in alphabetical order.
    heard_age_s: seconds since its last message. byte_age_s: seconds since the last byte of a payload. budget_s: how
    long the link may be silent until work of these learners is discarded; null: no limit. trouble: one line while a
    front is silent and learners are behind it; otherwise "".
    """

    name: str
    front: bool
    state: LinkState
    heard_age_s: float | None
    round_trip_s: float | None
    byte_age_s: float | None
    up_bytes_per_s: float
    down_bytes_per_s: float
    learners: int
    learner_names: list[str]
    budget_s: float | None
    trouble: str


class Region(BaseModel):
    """A region on the map. dots: at most 48 of its learners, those with problems first. Counts include all learners.

    links: at most 16, fronts first, then those of learners that are not connected.
    """

    region: str
    learners: dict[LearnerState, int]
    dots: list[Dot]
    links: list[Link]
    tokens_per_s: float | None
    up_bytes: int
    down_bytes: int
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    goodput: float
    cost: float


class Learner(BaseModel):
    """A learner. since: time at which its state began. lost_s: lost time by cause. last_seen_age_s: seconds since the
    core received the learner's last message."""

    learner: str
    region: str
    state: LearnerState
    since: float | None
    incarnation: int
    steps: int
    tokens: int
    tokens_per_s: float | None
    loss: float | None
    step_time_s: float | None
    last_seen_age_s: float
    blocked_fraction: float
    goodput: float
    provisioned_s: float
    lost_s: dict[str, float]
    lost_total_s: float
    pending: int
    waiting_for: str
    up_bytes: int
    down_bytes: int


class Fragment(BaseModel):
    """A fragment. size_bytes: size of its parameters in float32. state: what the fragment waits for, as text."""

    fragment: int
    shard: int
    parameters: int
    size_bytes: int
    version: int
    cycle: int
    state: str
    published_age_s: float | None


class Answer(BaseModel):
    """A learner's answer in a round.

    began_at: when the upload began. durable_at: when the core acknowledged the contribution. adopted_at: when the
    learner adopted the new version. declined: why the learner has no contribution. late: whether the contribution
    answers an earlier round, or was acknowledged after this round had closed.
    """

    learner: str
    began_at: float | None
    durable_at: float | None
    adopted_at: float | None
    declined: str
    late: bool
    weight: float | None
    staleness: float | None


class Round(BaseModel):
    """One round, from open to merged or lapsed. reason: why the round closed, or what the round waits for."""

    fragment: int
    cycle: int
    version: int | None
    outcome: Outcome
    reason: str
    opened_at: float
    quorum_at: float | None
    closed_at: float | None
    merged_at: float | None
    published_at: float | None
    answers: list[Answer]
    more_answers: int


class Receipt(BaseModel):
    """The fate of a contribution. key: learner/incarnation/fragment/seq. clipped: scaling factor; 1: not clipped.

    number: grows with each contribution to its shard.
    """

    shard: int
    number: int
    key: str
    learner: str
    fragment: int
    accepted_at: float
    tokens: int
    steps: int
    size_bytes: int
    norm: float
    clipped: float
    fate: Literal["pending", "merged", "refused"]
    version: int
    weight: float
    staleness: float
    reason: str


class Receipts(BaseModel):
    """Receipts, newest first. before: the value of `before` for the next page; null: this is the last page."""

    items: list[Receipt]
    before: str | None


class Checkpoint(BaseModel):
    """A checkpoint on the core's disk."""

    id: int
    taken_at: float
    merges: int
    size_bytes: int
    generation: int  # the run's generation when the checkpoint was taken


class Event(BaseModel):
    """An event. number: position among this dashboard's events. With a history file, a restart continues the numbers.

    The dashboard records the kinds unreachable and reachable. All other kinds come from the core.
    """

    number: int
    at: float
    kind: Kind
    learner: str
    text: str


class TimeAxis(BaseModel):
    """The time axis of a history."""

    at: list[float]
    gaps: list[tuple[float, float]]
    now: float


class History(TimeAxis):
    """Columns of equal length, with a value for each time. A history keeps at most a few hundred points.

    gaps: begin and end of each period without data. now: current time; a gap that has not ended reaches to it.
    """

    goodput: list[float | None]
    tokens_per_s: list[float | None]
    loss: list[float | None]
    up_bytes_per_s: list[float | None]
    down_bytes_per_s: list[float | None]


class LearnerHistory(TimeAxis):
    """The history of one learner. See History."""

    loss: list[float | None]
    tokens_per_s: list[float | None]


class Now(BaseModel):
    """A message of the stream /api/live, sent every second. rounds: open and merging rounds, without answers."""

    run: Run
    regions: list[Region]
    rounds: list[Round]
    last_event: int
