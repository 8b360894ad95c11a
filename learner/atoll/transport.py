"""gRPC as a learner uses it: channels, limits, back-off, and what a refusal means to it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Protocol

import grpc
import grpc.aio
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.frames import FrameStub

from atoll.lanes import Lanes

MESSAGE_BYTES = 16 << 20
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 10.0
DEAD_S = 20.0  # without a frame on a connection that was given up: a message is 8 MiB at most, of float32
GOODBYE_S = 5.0  # a core that hangs is not waited for longer

OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # for what nobody waits for: `Presence` knows much earlier
    ("grpc.keepalive_timeout_ms", 20_000),  # a ping stands behind the frames of a slow link
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # whoever calls waits between its attempts; this must not add to it
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # in truth how long a connection may take to come about: round trips
    ("grpc.use_local_subchannel_pool", 1),  # a channel is a connection of its own
]
WINDOWS = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2 << 20)]  # a frame does not wait for an answer


class Call(Protocol):
    """Of gRPC, as far as it is needed to give it up."""

    def cancel(self) -> object:
        """Whoever waits for it sees a CancelledError."""


class Cure(Enum):
    """What a learner does about a failed call."""

    JOIN_AGAIN = "join again"
    STOP = "stop: it would fail again"
    FETCH_WHOLE = "fetch the fragment whole"
    DROP_WORK = "fetch the fragment whole and give the outstanding work up"
    GIVE_UP = "do not send this again"
    TRY_AGAIN = "try again"


CURES = {
    grpc.StatusCode.UNAUTHENTICATED: Cure.JOIN_AGAIN,
    grpc.StatusCode.FAILED_PRECONDITION: Cure.STOP,
    grpc.StatusCode.NOT_FOUND: Cure.FETCH_WHOLE,
    grpc.StatusCode.OUT_OF_RANGE: Cure.DROP_WORK,
    grpc.StatusCode.INVALID_ARGUMENT: Cure.GIVE_UP,
    grpc.StatusCode.ALREADY_EXISTS: Cure.GIVE_UP,
    grpc.StatusCode.UNIMPLEMENTED: Cure.STOP,
}


def cure(error: grpc.aio.AioRpcError) -> Cure:
    """See the table at the head of outer.proto; whatever is not in it may pass by itself."""
    return CURES.get(error.code(), Cure.TRY_AGAIN)


def one_line(error: grpc.aio.AioRpcError) -> str:
    """For people: the status and its details."""
    return f"{error.code().name.lower()}: {detail(error)}"


def detail(error: grpc.aio.AioRpcError) -> str:
    """What the other side said, on one line: it may be anybody."""
    return " ".join((error.details() or "no details").split())


def hung_up() -> bool:
    """After a CancelledError: it was the call that was cancelled, with its connection, and not the task that waited."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


def backoff_s(attempt: int, rng: random.Random) -> float:
    """Exponential, with full jitter, so that learners do not come back all at once. attempt counts from 0."""
    return rng.uniform(0.5, 1.0) * min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(attempt, 16))


class Transfers:
    """Calls of one link that carry frames, and when each was last seen to."""

    def __init__(self) -> None:
        self._moved_at: dict[Call, float] = {}

    @contextlib.contextmanager
    def of(self, call: Call) -> Iterator[Callable[[], None]]:
        """While it lasts; what is given is called for each frame. The call is cancelled at the end."""

        def moved() -> None:
            self._moved_at[call] = time.monotonic()

        moved()
        try:
            yield moved
        finally:
            del self._moved_at[call]
            call.cancel()

    async def end(self) -> None:
        """Waits for those whose frames still move, and cancels the others: the connection was given up."""
        while self._moved_at:
            for call, at in list(self._moved_at.items()):
                if time.monotonic() - at > DEAD_S:
                    call.cancel()
            await asyncio.sleep(DEAD_S / 10)


class Link:
    """The connections to one address: for what must be quick, for what is said of uploads, and lanes for frames."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = self._dial()
        self.control = rpc.OuterStub(self._channel)
        self.offers, self._offering = self._lane()
        self.up, self.down = Lanes(self._lane), Lanes(self._lane)
        self.transfers = Transfers()

    def _dial(self, *options: tuple[str, int]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=[*OPTIONS, *options])

    def _lane(self) -> tuple[FrameStub, grpc.aio.Channel]:
        channel = self._dial(*WINDOWS)
        return FrameStub(channel), channel

    def answered(self, after_s: float) -> None:
        """How long an answer took that waited behind no frame."""
        self.up.answered(after_s)
        self.down.answered(after_s)

    def rest(self) -> None:
        """Called now and then: hangs up what was not needed for a while."""
        self.up.rest()
        self.down.rest()

    async def close(self) -> None:
        """Hangs up."""
        await self._channel.close()
        await self._offering.close()
        await self.up.close()
        await self.down.close()


async def retire(link: Link) -> None:
    """Hangs up when nothing moves on it any more."""
    link.up.give_up()
    link.down.give_up()
    try:
        await link.transfers.end()
    finally:
        await link.close()
