"""gRPC as a learner uses it: channels, limits, back-off, and what a refusal means to it."""

from __future__ import annotations

import asyncio
import random
import time
from enum import Enum

import grpc
import grpc.aio
from atoll_wire import outer_pb2_grpc as rpc

MESSAGE_BYTES = 16 << 20
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 10.0
RETIRED_S = 5.0  # without a frame on a connection that was given up, its calls are given up too
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


class Link:
    """Two connections to one address: one for what must be quick, one for frames."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(2)]
        self.control = rpc.OuterStub(self._channels[0])
        self.data = rpc.OuterStub(self._channels[1])
        self.moved_at = time.monotonic()  # a frame went or came

    def moved(self) -> None:
        """Called for each frame."""
        self.moved_at = time.monotonic()

    async def retire(self) -> None:
        """Lets calls end whose frames still come, and hangs up on the others."""
        try:
            while time.monotonic() - self.moved_at < RETIRED_S:  # noqa: ASYNC110 - time alone makes it so
                await asyncio.sleep(RETIRED_S / 10)
        finally:
            await self.close()

    async def close(self) -> None:
        """Hangs up."""
        for channel in self._channels:
            await channel.close()
