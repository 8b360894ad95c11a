"""The connections to one address, as a learner or a front dials it: channels, their options, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from atoll_wire.connections.connection_pool import ConnectionPool
from atoll_wire.connections.parallel_connections import ParallelConnections
from atoll_wire.messages.frame_messages import FrameStub
from atoll_wire.messages.message_parts import REPLY_BYTES
from atoll_wire.process.clock import Clock
from atoll_wire.security.transport import TransportSecurity

ATOLL_STATUS = (("atoll-status", "1"),)  # trailing metadata of whatever a core or a front answers on purpose
QUICK_CALLS = 48  # on one connection: a core takes 64
MAX_CARRIERS = 64  # connections: who has a slow one has more of them
DEAD_S = 20.0  # without a frame on a connection that was given up: a message is 8 MiB at most, of float32

OPTIONS = [
    ("grpc.max_receive_message_length", REPLY_BYTES),
    ("grpc.max_send_message_length", REPLY_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # for what nobody waits for: a learner's session knows much earlier
    ("grpc.keepalive_timeout_ms", 20_000),  # a ping stands behind the frames of a slow link
    ("grpc.http2.ping_timeout_ms", 20_000),  # the one that counts where frames are on their way: a minute otherwise
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # whoever calls waits between its attempts; this must not add to it
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # in truth how long a connection may take to come about: round trips
    ("grpc.use_local_subchannel_pool", 1),  # a channel is a connection of its own
]
KEEPALIVE = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
KEEPALIVE_OPTIONS = [  # where no frame stands before a ping
    *(option for option in OPTIONS if option[0] not in KEEPALIVE),
    *zip(KEEPALIVE, (6_000, 8_000, 8_000), strict=True),
]
FIXED_WINDOW_OPTIONS = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 << 20),
]  # a frame does not wait for an answer


class Call(Protocol):
    """The part of a gRPC call that is needed to give it up."""

    def cancel(self) -> object:
        """The call raises LinkLost where it is waited for."""


def is_atoll_status(error: grpc.RpcError) -> bool:
    """Whether a core or a front ended the call so, and not gRPC, a proxy, or whatever else answers on that port."""
    metadata: Any = error.trailing_metadata()
    return any(key == ATOLL_STATUS[0][0] for key, _ in metadata or ())


def is_unreachable(error: grpc.RpcError) -> bool:
    """Whether a call failed because neither a core nor a front answered."""
    return error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED} and not is_atoll_status(
        error
    )


class Transfers:
    """Calls of one link that carry frames, and when each was last seen to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._moved_at: dict[Call, float] = {}

    @contextlib.contextmanager
    def of(self, call: Call) -> Iterator[Callable[[], None]]:
        """While it lasts; what is given is called for each frame."""

        def moved() -> None:
            self._moved_at[call] = self._clock.monotonic()

        moved()
        try:
            yield moved
        finally:
            del self._moved_at[call]

    async def end(self) -> None:
        """Waits for those whose frames still move, and cancels the others: the connection was given up."""
        while self._moved_at:
            for call, at in list(self._moved_at.items()):
                if self._clock.monotonic() - at > DEAD_S:
                    call.cancel()
            await asyncio.sleep(DEAD_S / 10)


class Link:
    """The connections to one address, by what goes over them.

    quick: calls that must not wait behind frames; offers: what is said of uploads; carriers: streams that have a
    connection each; up, down: the frames of uploads and fetches. keepalive: dead quick connections are found soon.
    """

    def __init__(self, address: str, security: TransportSecurity, clock: Clock, *, keepalive: bool = False) -> None:
        self.address = address
        self.clock = clock
        self._security = security
        self._stamp: tuple[object, ...] | None = None  # of the certificates that it was first dialled with
        quick, frames = (
            partial(self._dial, KEEPALIVE_OPTIONS if keepalive else OPTIONS),
            partial(self._dial, OPTIONS + FIXED_WINDOW_OPTIONS),
        )
        self.quick = ConnectionPool(quick, clock, QUICK_CALLS)
        self.offers = ConnectionPool(frames, clock, 1, most=1, fewest=1)
        self.carriers = ConnectionPool(frames, clock, 1, MAX_CARRIERS)
        self.up = ParallelConnections(frames, clock)
        self.down = ParallelConnections(frames, clock)
        self.transfers = Transfers(clock)

    def _dial(self, options: Sequence[tuple[str, int]]) -> tuple[FrameStub, grpc.aio.Channel]:
        if self._stamp is None:
            self._stamp = self._security.stamp()
        channel = self._security.dial(self.address, options)
        return FrameStub(channel), channel

    @property
    def stale(self) -> bool:
        """Whether the certificates that it was dialled with have been replaced."""
        return self._stamp is not None and self._security.stamp() not in {(), self._stamp}

    def answered(self, after_s: float) -> None:
        """How long an answer took that waited behind no frame."""
        self.up.answered(after_s)
        self.down.answered(after_s)

    async def rest(self) -> None:
        """Called now and then: hangs up what was not needed for a while."""
        for each in (self.quick, self.offers, self.carriers, self.up, self.down):
            await each.rest()

    async def close(self) -> None:
        """Hangs up; the calls that still wait raise LinkLost."""
        for each in (self.quick, self.offers, self.carriers, self.up, self.down):
            await each.close()


async def close_gracefully(link: Link) -> None:
    """Ends the quick calls at once, and hangs up when no frame moves any more."""
    link.up.give_up()
    link.down.give_up()
    await link.quick.close()
    try:
        await link.transfers.end()
    finally:
        await link.close()
