"""The connections of a learner or a front to one address, their channel options, and their graceful close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from atoll_wire.connections.connection_pool import ConnectionPool
from atoll_wire.connections.link_speed import LinkSpeed, port_of
from atoll_wire.connections.parallel_connections import FAR_S, ParallelConnections
from atoll_wire.messages.frame_messages import FrameStub
from atoll_wire.messages.message_parts import REPLY_BYTES
from atoll_wire.process.clock import Clock
from atoll_wire.security.handshake import tls_fault
from atoll_wire.security.transport import TransportSecurity

ATOLL_STATUS = (("atoll-status", "1"),)  # trailing metadata of every status that a core or a front sets
CORE_AWAY = "atoll-core-away-bin"  # trailing metadata of a front's status: the address of a core that did not answer
QUICK_CALLS = 48  # limit on quick calls per connection; a server allows 64 calls
MAX_UPLOADS = 12  # limit on concurrent uploads; each has a call for its offer, and a server limits open calls
MAX_CARRIERS = 64  # limit on connections that each carry a single stream
DEAD_S = 20.0  # a closing link cancels calls that moved no frame for this many seconds; a float32 frame takes 2 MiB

OPTIONS = [
    ("grpc.max_receive_message_length", REPLY_BYTES),
    ("grpc.max_send_message_length", REPLY_BYTES),
    ("grpc.keepalive_time_ms", 30_000),  # for idle connections; a learner's session detects a dead link much earlier
    ("grpc.keepalive_timeout_ms", 20_000),  # on a slow link, a ping waits behind frames
    ("grpc.http2.ping_timeout_ms", 20_000),  # timeout while frames are in flight; the default is a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # callers already wait between attempts
    ("grpc.max_reconnect_backoff_ms", 100),
    # Despite its name, this is the timeout for connecting, which takes several round trips.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.use_local_subchannel_pool", 1),  # each channel has its own connection
]
KEEPALIVE = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
KEEPALIVE_OPTIONS = [  # for connections without frames, on which pings do not wait
    *(option for option in OPTIONS if option[0] not in KEEPALIVE),
    *zip(KEEPALIVE, (6_000, 8_000, 8_000), strict=True),
]
# With a fixed flow-control window, a frame does not wait for the other side to enlarge the window.
FIXED_WINDOW_OPTIONS = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2 << 20)]


class Call(Protocol):
    """The method of gRPC calls that this module uses."""

    def cancel(self) -> object:
        """Cancels the call. Code that waits for the call gets LinkLost."""


def is_atoll_status(error: grpc.RpcError) -> bool:
    """Returns whether a core or a front set this status, as opposed to gRPC, a proxy, or another server."""
    metadata: Any = error.trailing_metadata()
    return any(key == ATOLL_STATUS[0][0] for key, _ in metadata or ())


def is_unreachable(error: grpc.RpcError) -> bool:
    """Returns whether a call failed because neither a core nor a front answered."""
    return error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED} and not is_atoll_status(
        error
    )


def is_connection_lost(error: grpc.RpcError) -> bool:
    """Returns whether a call failed because its connection broke, and not with a status from a core or a front."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not is_atoll_status(error)


def core_away(error: grpc.RpcError) -> str:
    """Returns the address of the core that a front could not reach; empty if the call failed for another reason."""
    metadata: Any = error.trailing_metadata()
    found = (value for key, value in metadata or () if key == CORE_AWAY and isinstance(value, bytes))
    return " ".join(next(found, b"").decode(errors="replace").split())


class Transfers:
    """The calls of one link that carry frames, and the time of each call's last frame."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._moved_at: dict[Call, float] = {}

    @contextlib.contextmanager
    def of(self, call: Call) -> Iterator[Callable[[], None]]:
        """Context manager for a call that carries frames. Yields a function to call for each frame."""

        def moved() -> None:
            self._moved_at[call] = self._clock.monotonic()

        moved()
        try:
            yield moved
        finally:
            del self._moved_at[call]

    async def end(self) -> None:
        """Waits until all calls have ended. Cancels calls that have moved no frame for DEAD_S seconds."""
        while self._moved_at:
            for call, at in list(self._moved_at.items()):
                if self._clock.monotonic() - at > DEAD_S:
                    call.cancel()
            await asyncio.sleep(DEAD_S / 10)


class Link:
    """The connections to one address, grouped by use.

    quick: connections for calls that must not wait behind frames. offers: connection for the control calls of uploads.
    upload_slots: limits concurrent uploads.
    carriers: connections that each carry a single stream. up, down: connections for the frames of uploads and of
    fetches. keepalive: whether quick connections send frequent pings, which detect a dead connection early. metadata:
    metadata of readers' calls.
    """

    def __init__(
        self,
        address: str,
        security: TransportSecurity,
        clock: Clock,
        *,
        keepalive: bool = False,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._metadata = metadata
        self.address = address
        self.clock = clock
        self._security = security
        self._stamp: tuple[object, ...] | None = None  # stamp of the certificates of the first connection
        quick = partial(self._dial, KEEPALIVE_OPTIONS if keepalive else OPTIONS)
        frames = partial(self._dial, OPTIONS + FIXED_WINDOW_OPTIONS)
        self.quick = ConnectionPool(quick, clock, QUICK_CALLS)
        self.offers = ConnectionPool(frames, clock, 1, most=1, fewest=1)
        self.carriers = ConnectionPool(frames, clock, 1, MAX_CARRIERS)
        self.upload_slots = asyncio.Semaphore(MAX_UPLOADS)
        self.up = ParallelConnections(frames, clock)
        self.down = ParallelConnections(frames, clock)
        self.speed = LinkSpeed(port_of(address), clock)
        self.transfers = Transfers(clock)

    def _dial(self, options: Sequence[tuple[str, int]]) -> tuple[FrameStub, grpc.aio.Channel]:
        if self._stamp is None:
            self._stamp = self._security.stamp()
        channel = self._security.dial(self.address, options)
        return FrameStub(channel, self._metadata), channel

    @property
    def stale(self) -> bool:
        """Whether the certificate files have changed since the first connection."""
        return self._stamp is not None and self._security.stamp() not in {(), self._stamp}

    async def tls_fault(self) -> str:
        """Returns why TLS prevents connections to the address, with the fix; empty if TLS is not the cause."""
        return await asyncio.to_thread(tls_fault, self.address, self._security)

    def answered(self, after_s: float) -> None:
        """Records a response time. after_s: seconds until an answer that did not wait behind a frame."""
        self.up.answered(after_s, self.speed.round_trip_s)
        self.down.answered(after_s, self.speed.round_trip_s)

    def look(self) -> None:
        """Records the kernel's round trip if it is long, which opens more connections for the first upload."""
        round_trip_s = self.speed.round_trip_s
        if round_trip_s is not None and round_trip_s >= FAR_S:
            self.answered(round_trip_s)

    @property
    def fast(self) -> bool:
        """Whether the link is short, and carries payloads faster than the compressor makes them smaller.

        A long link is never fast in this sense, since traffic over it usually costs money.
        """
        return not self.up.far and self.speed.exceeds_compressor

    @property
    def round_trip_s(self) -> float:
        """The shortest of the newest response times, in seconds; 0 if there are none."""
        return self.up.round_trip_s

    async def rest(self) -> None:
        """Closes idle connections. Call this regularly."""
        for each in (self.quick, self.offers, self.carriers, self.up, self.down):
            await each.rest()

    async def close(self) -> None:
        """Closes all connections. Waiting calls raise LinkLost."""
        for each in (self.quick, self.offers, self.carriers, self.up, self.down):
            await each.close()


async def close_gracefully(link: Link) -> None:
    """Ends the quick calls immediately and closes the link when its transfers have ended."""
    link.up.give_up()
    link.down.give_up()
    await link.quick.close()
    try:
        await link.transfers.end()
    finally:
        await link.close()
