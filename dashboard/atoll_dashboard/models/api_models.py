"""What the JSON API says: the one description that the page, the OpenAPI schema and other programs share.

Seconds, bytes and parameters; times are seconds since 1970 of the core's clock; null is "not known (yet)".
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from atoll_wire.contract import LearnerState
from pydantic import BaseModel

T = TypeVar("T")

Outcome = Literal["open", "merging", "merged", "lapsed"]
Kind = Literal["core", "joined", "back", "silent", "left", "evicted", "refused", "checkpoint", "paused", "trouble"]


class Page(BaseModel, Generic[T]):
    """A part of a longer list. total: of all that match, before the page is cut out of them."""

    total: int
    offset: int
    items: list[T]


class Goodput(BaseModel):
    """Useful / provisioned learner-seconds. recent: of the last five minutes. lost_s: by cause."""

    ratio: float
    recent: float | None
    useful_s: float
    provisioned_s: float
    lost_s: dict[str, float]


class Counts(BaseModel):
    """Contributions by fate."""

    accepted: int
    merged: int
    pending: int
    refused: int
    turned_away: int


class Wire(BaseModel):
    """Payloads. whole: fragments that were sent whole, and first parameters. bits: of one parameter, as coded."""

    up_bytes: int
    down_bytes: int
    whole_bytes: int
    up_bytes_per_s: float
    down_bytes_per_s: float
    up_bits: float | None
    down_bits: float | None


class Cost(BaseModel):
    """What the WAN costs at a price per GB (1e9 bytes), both directions. budget_gb: a month's, null: none is set.

    per_day, gb_per_month: as the last hour went; null in a dashboard's first minute.
    """

    price_per_gb: float
    total: float
    per_day: float | None
    gb_per_month: float | None
    budget_gb: float | None


class Run(BaseModel):
    """The run at one moment: `at`, of the core's clock.

    reachable: whether the core answered the last time; problem: why not, in a line. age_s: how old all this is.
    paused: who paused the run and why, "" while it goes on. actions: whether the core knows tokens, so that acts can be
    asked for here; actions_problem: what to do otherwise. learners: how many in each state. dashboard_s: how long this
    dashboard has been looking: older history is not here.
    """

    reachable: bool
    problem: str
    age_s: float
    at: float
    run: str
    generation: int
    restored: int  # the checkpoint that this generation began at; 0: it is the first
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
    total_tokens: int  # that the run is to train; 0: not known
    tokens_per_s: float
    loss: float | None
    merges: int
    contributions: Counts
    wire: Wire
    cost: Cost
    learners: dict[LearnerState, int]
    actions: bool
    actions_problem: str
    dashboard_s: float


class Dot(BaseModel):
    """A learner in the picture. lost_s: of its time, so far."""

    learner: str
    state: LearnerState
    since: float | None
    uploading: bool
    lost_s: float


class Region(BaseModel):
    """A region in the picture. dots: at most 48 of its learners, those in trouble first; the counts are of all."""

    region: str
    learners: dict[LearnerState, int]
    dots: list[Dot]
    tokens_per_s: float
    up_bytes: int
    down_bytes: int
    up_bytes_per_s: float
    down_bytes_per_s: float
    goodput: float
    cost: float


class Learner(BaseModel):
    """A learner. since: when it came into its state. lost_s: by cause, as Goodput's. last_seen_age_s: ago."""

    learner: str
    region: str
    state: LearnerState
    since: float | None
    incarnation: int
    steps: int
    tokens: int
    tokens_per_s: float
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
    """A fragment. size_bytes: of its parameters in float32. state: what it waits for, in words."""

    fragment: int
    parameters: int
    size_bytes: int
    version: int
    cycle: int
    state: str
    published_age_s: float | None


class Answer(BaseModel):
    """One learner in a round: began_at: its first frame came; durable_at: acknowledged; adopted_at: trains on from it.

    declined: why it has nothing for this round. late: what it sent answers an earlier one.
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
    """One round, from open to merged or lapsed. reason: why it closed, or what it waits for."""

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
    """What became of a contribution. key: learner/incarnation/fragment/seq. clipped: 1 is not at all."""

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
    """Newest first. before: ask with it for those that came earlier; null: there are none."""

    items: list[Receipt]
    before: int | None


class Checkpoint(BaseModel):
    """A snapshot on the core's disk."""

    id: int
    taken_at: float
    merges: int
    size_bytes: int
    generation: int  # that took it


class Event(BaseModel):
    """Something that happened. number: grows, of this dashboard."""

    number: int
    at: float
    kind: Kind
    learner: str
    text: str


class History(BaseModel):
    """Columns of equal length: at each time what was seen. Thinned out, so that at most some hundred points remain."""

    at: list[float]
    goodput: list[float | None]
    tokens_per_s: list[float | None]
    loss: list[float | None]
    up_bytes_per_s: list[float | None]
    down_bytes_per_s: list[float | None]


class LearnerHistory(BaseModel):
    """The same for one learner."""

    at: list[float]
    loss: list[float | None]
    tokens_per_s: list[float | None]


class Now(BaseModel):
    """What the stream /api/live says every second. rounds: those that are open or merged now, without answers."""

    run: Run
    regions: list[Region]
    rounds: list[Round]
    last_event: int
