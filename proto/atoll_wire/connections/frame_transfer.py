"""Uploads and downloads frames over several connections.

In an upload, all connections take frames from one queue. In a download, each connection fetches its share.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc.aio

from atoll_wire import outer_pb2 as pb
from atoll_wire.codec.checksums import crc32c
from atoll_wire.connections.calls import LinkLost, open_stream, tolerate_ended_call
from atoll_wire.connections.connection_pool import Connection
from atoll_wire.connections.link import Link
from atoll_wire.connections.parallel_connections import TransferProgress
from atoll_wire.messages.frame_messages import EncodedFrame, WireFrame, count_fitting, frames_in

LOOK_S = 0.05  # seconds between checks for late frames
LAST_WORD_S = 1.0  # seconds that an upload waits for the core's reason after a stream fails


async def upload(
    link: Link,
    head: Callable[[], pb.PushHeader],
    messages: Mapping[int, EncodedFrame],
    sent: Callable[[int], None],
    *,
    known: bool = False,
) -> pb.Receipt | None:
    """Offers a contribution and sends the frames that the core lacks. Returns the receipt, if one arrived.

    head: function that returns the header; called at this contribution's turn. messages: encoded frames by number.
    sent: function called with the number of each frame that was passed to gRPC. known: whether the core should already
    have all frames. Raises AioRpcError and LinkLost.
    """
    link.look()
    async with contextlib.nullcontext() if known else link.upload_slots:
        # This wait may be long. The offer is sent afterwards, so that the core reserves no space during the wait.
        carrier = None if known else await link.up.take()
        header = head()
        with link.offers.use() as connection, link.up.carrying() as carried:
            try:
                with open_stream("Push", connection.stub.Push()) as call, link.transfers.of(call) as moved:
                    streams = _Streams(link, header, messages, carrier, sent, moved, carried, call.cancel)
                    try:
                        return await _offer(link, header, call, streams)
                    finally:
                        await streams.end()
            except LinkLost:
                streams.raise_why()
                raise


async def _offer(link: Link, header: pb.PushHeader, call: Any, streams: _Streams) -> pb.Receipt | None:  # noqa: ANN401
    """Offers a contribution over a call without frames, so that the core's replies do not wait behind a frame."""
    asked_at = link.clock.monotonic()
    asking = pb.PushHeader(control_only=True)
    asking.MergeFrom(header)
    await call.write(pb.PushRequest(header=asking))
    reply = await call.read()
    link.answered(link.clock.monotonic() - asked_at)
    if isinstance(reply, pb.PushReply) and reply.HasField("received"):
        streams.begin(reply.received.frames)
        with contextlib.suppress(grpc.aio.InternalError):  # the call has ended: reading raises the reason
            await call.done_writing()
        while isinstance(reply, pb.PushReply) and reply.HasField("received"):
            reply = await call.read()
    return reply.receipt if isinstance(reply, pb.PushReply) else None


class _Streams:
    """The streams of one upload. carrier: connection of the first stream, or None. give_up: function that ends a failed
    upload."""

    def __init__(
        self,
        link: Link,
        header: pb.PushHeader,
        messages: Mapping[int, EncodedFrame],
        carrier: Connection | None,
        sent: Callable[[int], None],
        moved: Callable[[], None],
        carried: TransferProgress,
        give_up: Callable[[], object],
    ) -> None:
        self._link = link
        self._header = header
        self._messages = messages
        self._carrier = carrier
        self._sent = sent
        self._moved = moved
        self._carried = carried
        self._give_up = give_up
        self._left: deque[int] = deque()  # frames that no stream has taken
        self._out: dict[int, float] = {}  # when each frame was last given to a stream
        self._received: set[int] = set()  # frames that the core has acknowledged
        self._twice: set[int] = set()  # frames given to several streams, whose times are not used
        self._helping = False
        self._failed: grpc.aio.AioRpcError | None = None  # error of a stream that ended before it took a frame
        self._heard = asyncio.Event()
        self._tasks = list[asyncio.Task[None]]()

    def begin(self, received: Iterable[int]) -> None:
        """Starts streams that send the frames that the core lacks. received: frames that the core has."""
        self._received.update(received)
        self._left.extend(index for index in self._messages if index not in self._received)
        self._carried.waiting(len(self._left))
        for number in range(min(self._link.up.count, len(self._left))):
            task = self._start(self._first(self._carrier) if self._carrier and number == 0 else self._another())
            task.add_done_callback(self._ended)

    async def end(self) -> None:
        """Cancels all streams and waits until they have ended."""
        if self._carrier is not None:
            self._link.up.give(self._carrier)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def raise_why(self) -> None:
        """Raises the error of the stream that ended the upload, if any."""
        for task in self._tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, LinkLost):
                raise error
        if self._failed is not None and self._left:
            raise self._failed

    def _start(self, stream: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.append(task := asyncio.create_task(stream))
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Ends the upload LAST_WORD_S seconds after frames were lost, so that the core can send the reason first."""
        stranded = bool(self._left) and all(other.done() for other in self._tasks)  # no stream is left to send the rest
        if stranded or task.cancelled() or task.exception() is not None:
            asyncio.get_running_loop().call_later(LAST_WORD_S, self._give_up)

    async def _first(self, carrier: Connection) -> None:
        self._carrier = None  # from now on, the stream returns the connection
        await self._carry(carrier, self._left)

    async def _another(self) -> None:
        """Runs another stream when a connection is free. Returns if no frames are left or the pool is closed."""
        try:
            carrier = await self._link.up.take()
        except LinkLost:
            return  # running streams continue
        await self._carry(carrier, self._left)

    async def _help(self) -> None:
        """Sends late frames again over spare connections, until all have been acknowledged."""
        while missing := [index for index in self._out if index not in self._received]:
            late, now = min(missing, key=self._out.__getitem__), self._link.clock.monotonic()
            due_s = self._out[late] + self._link.up.max_wait_s - now
            if due_s > 0 or not self._link.up.spare:
                await asyncio.sleep(max(due_s, LOOK_S))
                continue
            self._out[late] = now
            self._twice.add(late)
            self._start(self._once_more(late))
            await asyncio.sleep(0)  # lets the new stream take its connection, which is then no longer spare

    async def _once_more(self, index: int) -> None:
        """Sends a frame again while another stream is sending it."""
        with contextlib.suppress(grpc.aio.AioRpcError, LinkLost):  # another stream may deliver the frame
            carrier = await self._link.up.take()
            await self._carry(carrier, deque([] if index in self._received else [index]))

    async def _carry(self, carrier: Connection, frames: deque[int]) -> None:
        """Runs a stream: sends frames until none are left, and reads acknowledgements.

        Raises AioRpcError and LinkLost.
        """
        if not frames:
            self._link.up.give(carrier)
            return
        mine = set[int]()
        with open_stream("Push", carrier.stub.Push()) as call, self._link.transfers.of(call) as moved:
            hearing = asyncio.create_task(self._hear(call))
            try:
                await self._send(call, frames, mine, moved)
                if not mine and frames:  # the call has ended: wait for the reason
                    await asyncio.wait({hearing}, timeout=LAST_WORD_S)
                while not mine <= self._received and not hearing.done():
                    self._heard.clear()
                    await self._heard.wait()
                    moved()
            finally:
                self._link.up.give(carrier)  # not earlier: until acknowledged, frames wait in the core's memory
                if not hearing.done():
                    hearing.cancel()
                [error] = await asyncio.gather(hearing, return_exceptions=True)
            if not mine <= self._received:
                raise error or LinkLost("a stream was closed before its frames were acknowledged")
            if not mine and isinstance(error, grpc.aio.AioRpcError):
                self._failed = error  # running streams continue
            if not self._left and not self._helping:
                self._helping = True
                self._start(self._help())

    async def _send(
        self,
        call: Any,  # noqa: ANN401 - gRPC's
        frames: deque[int],
        mine: set[int],
        moved: Callable[[], None],
    ) -> None:
        """Sends frames until none are left or the call ends. `_hear` raises the call's error."""
        with tolerate_ended_call():
            await call.write(pb.PushRequest(header=self._header))
            while frames:
                sizes = (self._messages[index].size_bytes for index in frames)
                some = [frames.popleft() for _ in range(count_fitting(sizes, self._link.up.together))]
                mine.update(some)
                if frames is self._left:
                    self._out.update(dict.fromkeys(some, self._link.clock.monotonic()))
                    self._carried.waiting(len(self._left))
                await call.write(b"".join(piece for index in some for piece in self._messages[index].pieces))
                for index in some:
                    self._sent(index)
                self._moved()
                moved()
            await call.done_writing()

    async def _hear(self, call: Any) -> None:  # noqa: ANN401 - gRPC's call
        """Reads acknowledgements until the call ends."""
        try:
            while isinstance(reply := await call.read(), pb.PushReply):
                self._moved()
                told = self._messages if reply.HasField("receipt") else reply.received.frames
                new = {index for index in told if index in self._messages} - self._received
                self._received |= new
                if new:
                    now = self._link.clock.monotonic()
                    taken_s = [now - self._out[index] for index in new - self._twice if index in self._out]
                    self._carried.arrived(sum(self._messages[index].size_bytes for index in new), taken_s)
                self._heard.set()
        finally:
            self._heard.set()


OnFrame: TypeAlias = Callable[[pb.FetchHeader, WireFrame | pb.Frame], None]


async def download(link: Link, request: pb.FetchRequest | pb.ReadRequest, wanted: Sequence[int], took: OnFrame) -> bool:
    """Fetches frames of an update or a fragment, each once and in any order. Raises AioRpcError and LinkLost.

    wanted: frame indices, ascending. took: function called with each received frame and the header of its stream.
    Received frames stay valid if the download fails later, and another call can fetch the missing frames. Returns False
    if a stream broke the protocol.
    """
    stripes = min(link.down.count, len(wanted))
    tasks = [asyncio.create_task(_stripe(link, request, wanted[n::stripes], took)) for n in range(stripes)]
    try:
        return all(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stripe(link: Link, request: pb.FetchRequest | pb.ReadRequest, mine: Sequence[int], took: OnFrame) -> bool:
    """Fetches frames over one call. Returns False as soon as a reply is invalid."""
    header, missing = None, deque(mine)
    asked: Any = type(request)(frames=mine, fast=link.fast)
    asked.MergeFrom(request)
    carrier = await link.down.take()
    method = "Read" if isinstance(request, pb.ReadRequest) else "Fetch"
    fetch = getattr(carrier.stub, method)
    try:
        with (
            open_stream(method, fetch(asked)) as call,
            link.transfers.of(call) as moved,
            link.down.carrying() as carried,
        ):
            carried.waiting(len(missing))
            async for reply in call:
                moved()
                if header is None:
                    if not isinstance(reply, pb.FetchReply) or not reply.HasField("header"):
                        return False
                    header = reply.header
                    continue
                if not (brought := frames_in(reply)):
                    return False
                for frame in brought:
                    if not missing or frame.index != missing[0] or crc32c(frame.payload) != frame.crc32c:
                        return False
                    missing.popleft()
                    took(header, frame)
                    carried.arrived(len(frame.payload))
                    carried.waiting(len(missing))
    finally:
        link.down.give(carrier)
    return not missing
