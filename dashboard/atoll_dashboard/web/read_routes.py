"""Read-only routes, which return JSON for the page and for other programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from operator import itemgetter
from typing import Annotated, Literal

from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import FATES, Fate, LearnerState
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from fastapi.responses import StreamingResponse

from atoll_dashboard.feed.run_feed import RunFeed
from atoll_dashboard.feed.run_rates import LOSS, TOKENS, column
from atoll_dashboard.models import conversion
from atoll_dashboard.models.api_models import (
    Checkpoint,
    Event,
    Fragment,
    History,
    Learner,
    LearnerHistory,
    Page,
    Receipts,
    Region,
    Round,
    Run,
)

MAX_STREAMS = 200
MAX_POSITION = 32_768  # limit on the length of a position in the receipts
POSITION = r"^([0-9]{1,4}:[0-9]{1,19}(,[0-9]{1,4}:[0-9]{1,19})*)?$"  # ListReceiptsReply.next

SortBy = Literal["trouble", "learner", "region", "state", "steps", "tokens_per_s", "loss", "goodput", "lost", "heard"]
Offset = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(ge=1, le=500)]

router = APIRouter(tags=["look"])


def feed_of(request: Request) -> RunFeed:
    """Returns the application's feed, which polls more often for a while after each request."""
    feed: RunFeed = request.app.state.feed
    feed.watched()
    return feed


FeedOfRequest = Annotated[RunFeed, Depends(feed_of)]


@router.get("/run")
async def run(feed: FeedOfRequest) -> Run:
    """The run's current state."""
    return feed.run()


@router.get("/regions")
async def regions(feed: FeedOfRequest) -> list[Region]:
    """All regions with their learners."""
    return feed.regions()


@router.get("/learners")
async def learners(
    feed: FeedOfRequest,
    region: str | None = None,
    state: LearnerState | None = None,
    search: Annotated[str, Query(max_length=64)] = "",
    sort: SortBy = "trouble",
    descending: bool = False,
    offset: Offset = 0,
    limit: Limit = 50,
) -> Page[Learner]:
    """One page of the list of learners. Learners without a sort value come last."""
    found = in_order(feed.learners(region, state or "", search), sort, descending=descending)
    return Page[Learner](total=len(found), offset=offset, items=found[offset : offset + limit])


@router.get("/learners/{name}")
async def learner(feed: FeedOfRequest, name: str) -> Learner:
    """One learner. The status is 404 for an unknown name."""
    found = feed.learner(name)
    if found is None:
        raise HTTPException(404, f'this run has no learner "{name[:80]}": `atoll status` lists its learners')
    return found


@router.get("/learners/{name}/history")
async def learner_history(feed: FeedOfRequest, name: str) -> LearnerHistory:
    """The history of a learner since the dashboard's start; with a history file, also from before."""
    columns = feed.rates.learners_history
    return LearnerHistory(
        **feed.time_axis(columns),
        loss=columns.column(column(LOSS, name)),
        tokens_per_s=columns.column(column(TOKENS, name)),
    )


@router.get("/history")
async def history(feed: FeedOfRequest) -> History:
    """The history of the run since the dashboard's start; with a history file, also from before."""
    columns = feed.rates.history
    return History(
        **feed.time_axis(columns),
        goodput=columns.column("goodput"),
        tokens_per_s=columns.column("tokens"),
        loss=columns.column("loss"),
        up_bytes_per_s=columns.column("up"),
        down_bytes_per_s=columns.column("down"),
    )


@router.get("/fragments")
async def fragments(feed: FeedOfRequest, offset: Offset = 0, limit: Limit = 100) -> Page[Fragment]:
    """One page of the list of fragments."""
    told = feed.seen.status.fragments
    owners = {index: each.shard for each in feed.seen.status.shards for index in each.fragments}
    items = [conversion.fragment(each, owners.get(each.fragment, 0)) for each in told[offset : offset + limit]]
    return Page[Fragment](total=len(told), offset=offset, items=items)


@router.get("/rounds")
async def rounds(feed: FeedOfRequest, last: Annotated[int, Query(ge=1, le=256)] = 40, learner: str = "") -> list[Round]:
    """Recent rounds, newest first. learner: the only learner whose answers are returned."""
    return [conversion.round_of(each) for each in await feed.shared(feed.core.rounds, last, learner)]


@router.get("/receipts")
async def receipts(
    feed: FeedOfRequest,
    learner: str = "",
    fate: Literal["pending", "merged", "refused"] | None = None,
    before: Annotated[str, Query(pattern=POSITION, max_length=MAX_POSITION)] = "",
    limit: Limit = 100,
) -> Receipts:
    """Receipts of contributions, newest first."""
    wanted = FATES[Fate(fate)] if fate is not None else pb.FATE_UNSPECIFIED
    found = await feed.shared(feed.core.receipts, learner, wanted, before, limit)
    items = [conversion.receipt(each) for each in found.receipts]
    return Receipts(items=items, before=found.next if len(items) == limit else None)


@router.get("/checkpoints")
async def checkpoints(feed: FeedOfRequest) -> list[Checkpoint]:
    """Checkpoints on the core's disk, newest first."""
    return [conversion.checkpoint(each) for each in reversed(await feed.shared(feed.core.checkpoints))]


@router.get("/events")
async def events(feed: FeedOfRequest, after: Annotated[int, Query(ge=0)] = 0, limit: Limit = 200) -> list[Event]:
    """Events since the dashboard was started, and earlier events that the core kept, newest first."""
    newer = [each for each in feed.events if each.number > after]
    return newer[::-1][:limit]


@router.get("/live", response_class=StreamingResponse)
async def live(feed: FeedOfRequest, request: Request) -> StreamingResponse:
    """A stream of server-sent events, one per second, even while the core does not answer.

    Each event is a JSON object with `run`, `regions`, `last_event`, and open or merging `rounds`, without answers.
    """
    if feed.watchers >= MAX_STREAMS:
        raise HTTPException(503, f"{MAX_STREAMS} pages are already open: close one")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_stream(feed, request), media_type="text/event-stream", headers=headers)


async def _stream(feed: RunFeed, request: Request) -> AsyncIterator[str]:
    feed.watchers += 1
    try:
        yield "retry: 1000\n\n"
        while not await request.is_disconnected():
            yield f"data: {feed.now_json()}\n\n"
            await feed.changed()
    finally:
        feed.watchers -= 1


def in_order(learners: Iterable[Learner], sort: SortBy, *, descending: bool) -> list[Learner]:
    """Returns the learners, sorted by a value and then by name. Unknown values come last in both directions."""
    found = [(_value(each, sort), each) for each in sorted(learners, key=lambda each: each.learner)]
    known = [(value, each) for value, each in found if value is not None]
    known.sort(key=itemgetter(0), reverse=descending)
    return [each for _, each in known] + [each for value, each in found if value is None]


def _value(each: Learner, sort: SortBy) -> float | str | None:
    match sort:
        case "trouble":
            return conversion.TROUBLE_FIRST[each.state]
        case "lost":
            return each.lost_total_s
        case "heard":
            return each.last_seen_age_s
        case _:
            value: float | str | None = getattr(each, sort)
            return value
