"""Routes for operator actions. The dashboard forwards each action with the operator's token, which the core checks."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated

from atoll_wire.contract import AUTHORIZATION, BEARER
from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from atoll_dashboard.feed.core_client import CoreClient
from atoll_dashboard.feed.run_feed import RunFeed

Name = Annotated[str, Field(min_length=1, max_length=64)]
Reason = Annotated[str, Field(max_length=200)]
TICKET_S = 60.0
MAX_TICKETS = 100
MAX_OF_ONE = 5
HEADER = "x-atoll-token"
CHALLENGE = {"WWW-Authenticate": "Bearer"}

router = APIRouter(tags=["act"])


class Pause(BaseModel):
    """A request to pause the run. reason: text for learners and operators."""

    reason: Reason = "from the dashboard"


class Evict(BaseModel):
    """A request to evict a learner. reason: text for the learner, which the core also records."""

    learner: Name
    reason: Reason = "from the dashboard"


class Readmit(BaseModel):
    """A request to let an evicted learner join again."""

    learner: Name


class ActionDone(BaseModel):
    """The result of an action, on one line."""

    said: str


class Ticket(BaseModel):
    """A URL for one download of the model within a minute. Browsers cannot send a token when they follow a link."""

    url: str


@dataclass(slots=True)
class Tickets:
    """Tickets for downloads that have not begun. Each ticket stores a token and expires after TICKET_S seconds."""

    _kept: dict[str, tuple[float, str]] = field(default_factory=dict)

    def new(self, token: str) -> str:
        """Returns a ticket for a token. Raises HTTPException if too many tickets are open."""
        now = time.monotonic()
        self._kept = {name: kept for name, kept in self._kept.items() if kept[0] > now}
        mine = sum(kept[1] == token for kept in self._kept.values())
        if len(self._kept) >= MAX_TICKETS or mine >= MAX_OF_ONE:
            raise HTTPException(503, "too many downloads are waiting to begin: try again in a minute")
        name = secrets.token_urlsafe(32)
        self._kept[name] = (now + TICKET_S, token)
        return name

    def use(self, name: str) -> str:
        """Returns the token of a ticket and removes the ticket. Raises HTTPException for a used or expired ticket."""
        until, token = self._kept.pop(name, (0.0, ""))
        if until < time.monotonic():
            raise HTTPException(403, "this link was already used, or is older than a minute: start the download again")
        return token


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """The core that an operator action calls, and the operator's token."""

    core: CoreClient
    token: str


def operator_action(request: Request) -> OperatorAction:
    """Returns the action with the caller's own token. Raises HTTPException for a missing or malformed token.

    The page sends the token in its own header, because a proxy may use `Authorization`.
    """
    feed: RunFeed = request.app.state.feed
    shown = request.headers.get(AUTHORIZATION, "")
    token = request.headers.get(HEADER, shown.removeprefix(BEARER) if shown.startswith(BEARER) else "").strip()
    if not token:
        raise HTTPException(401, "this action needs an operator's token: create one with `atoll token NAME`", CHALLENGE)
    if not (token.isascii() and token.isprintable()):
        raise HTTPException(401, "the token contains invalid characters: give the token that `atoll token` printed")
    if problem := feed.actions_problem():
        raise HTTPException(409, problem)
    return OperatorAction(feed.core, token)


ActionRequest = Annotated[OperatorAction, Depends(operator_action)]


def _done(said: str, unconfirmed: list[int]) -> ActionDone:
    """Returns an action's result. unconfirmed: shards that apply the action later."""
    if unconfirmed:
        shards = f"shard{'s' * (len(unconfirmed) > 1)} {', '.join(map(str, unconfirmed))}"
        said += f"; not yet confirmed by {shards}"
    return ActionDone(said=said)


@router.post("/actions/pause")
async def pause(what: Pause, action: ActionRequest) -> ActionDone:
    """Pauses the run. Learners wait in step(), and no round opens until the run is resumed."""
    late = await action.core.pause(action.token, what.reason or "from the dashboard")
    return _done("the run is paused", late)


@router.post("/actions/resume")
async def resume(action: ActionRequest) -> ActionDone:
    """Resumes the run."""
    late = await action.core.pause(action.token, "")
    return _done("the run was resumed", late)


@router.post("/actions/evict")
async def evict(what: Evict, action: ActionRequest) -> ActionDone:
    """Evicts a learner. The core refuses its pending work, and the learner stops. Readmission lets it join again."""
    late = await action.core.evict(action.token, what.learner, what.reason or "from the dashboard")
    return _done(f"{what.learner} was evicted", late)


@router.post("/actions/readmit")
async def readmit(what: Readmit, action: ActionRequest) -> ActionDone:
    """Lets an evicted learner join again."""
    late = await action.core.evict(action.token, what.learner, "")
    return _done(f"{what.learner} may join again", late)


@router.post("/actions/checkpoint")
async def checkpoint(action: ActionRequest) -> ActionDone:
    """Takes a checkpoint. The response is sent when the checkpoint is durable."""
    taken = await action.core.take_checkpoint(action.token)
    return ActionDone(said=f"checkpoint {taken.id} is durable: {taken.size_bytes / 1e6:.1f} MB")


@router.post("/actions/download-ticket")
async def ticket(action: ActionRequest, request: Request) -> Ticket:
    """Creates a ticket for one download of the published model."""
    await action.core.status(action.token)  # fails for an invalid token, which must not get a ticket
    tickets: Tickets = request.app.state.tickets
    return Ticket(url=f"api/model?ticket={tickets.new(action.token)}")


@router.get("/model", response_class=StreamingResponse)
async def model(request: Request, ticket: str) -> StreamingResponse:
    """Downloads the published model as a safetensors file for load_state_dict()."""
    feed: RunFeed = request.app.state.feed
    chunks = feed.core.export(request.app.state.tickets.use(ticket))
    first = await anext(chunks)  # raises an error of the core before the response begins
    run = re.sub(r"[^A-Za-z0-9_-]", "_", feed.seen.status.run)  # the run's name goes into a header
    name = f"atoll-{run}-{feed.seen.status.merges}.safetensors"
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return StreamingResponse(_from(first, chunks), media_type="application/octet-stream", headers=headers)


async def _from(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk
