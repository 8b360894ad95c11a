"""Frames over as many connections as there are.

Up, each takes the next frame of a contribution from one queue when it can; down, each is asked for its share.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc.aio
from atoll_wire import codec
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import Payload
from atoll_wire.frames import WireFrame

from atoll.transport import Link, hung_up


async def upload(
    link: Link, header: pb.PushHeader, messages: Sequence[bytes], sent: Callable[[int], None]
) -> pb.Receipt | None:
    """Offers a contribution, sends the frames that the core lacks, and returns its answer, if it gives one.

    messages: of all frames; sent: told the index of each that was handed over. Raises AioRpcError.
    """
    lane = await link.up.take()
    call, helpers = lane.stub.Push(), list[asyncio.Task[None]]()
    with link.transfers.of(call) as moved, link.up.carrying() as arrived:
        try:
            try:
                await call.write(pb.PushRequest(header=header))
                # Before any frame: a write that meets the end of its call makes gRPC forget why that was.
                reply = await call.read()
                if not isinstance(reply, pb.PushReply) or not reply.HasField("have"):
                    return reply.receipt if isinstance(reply, pb.PushReply) and reply.HasField("receipt") else None
                have = set(reply.have.frames)
                left = deque(index for index in range(len(messages)) if index not in have)
                stream = _Stream(link, header, messages, left, sent)
                for _ in range(min(link.up.count, len(left)) - 1):
                    helpers.append(asyncio.create_task(stream.help()))
                    helpers[-1].add_done_callback(lambda helper: _give_up(helper, call))
                size_bytes = sum(len(messages[index]) for index in left)
                await stream.send(call, moved)
            finally:
                link.up.give(lane)
            receipt = await _receipt(call)
            if receipt is not None:
                arrived(size_bytes)
            return receipt
        except asyncio.InvalidStateError:
            await _raise_status(call)
        except asyncio.CancelledError:
            if hung_up():
                _raise_of(helpers)
            raise
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)


class _Stream:
    """What the streams of one upload share. left: indices of frames that nobody has sent yet."""

    def __init__(
        self,
        link: Link,
        header: pb.PushHeader,
        messages: Sequence[bytes],
        left: deque[int],
        sent: Callable[[int], None],
    ) -> None:
        self._link, self._header, self._messages, self._left, self._sent = link, header, messages, left, sent

    async def help(self) -> None:
        """Another stream, when it is its turn and frames are left."""
        lane = await self._link.up.take()
        call = lane.stub.Push() if self._left else None
        if call is None:
            self._link.up.give(lane)
            return
        with self._link.transfers.of(call) as moved:
            try:
                await call.write(pb.PushRequest(header=self._header))
                await self.send(call, moved)
            except asyncio.InvalidStateError:
                await _raise_status(call)
            finally:
                self._link.up.give(lane)
            await _receipt(call)  # what it sent is there; the first stream hears the same

    async def send(self, call: Any, moved: Callable[[], None]) -> None:  # noqa: ANN401 - gRPC's call
        """Frames, until none is left."""
        while self._left:
            index = self._left.popleft()
            await call.write(self._messages[index])
            self._sent(index)
            moved()
        await call.done_writing()


async def download(
    link: Link, request: pb.FetchRequest, frames: int
) -> tuple[pb.FetchHeader | None, Sequence[Payload]]:
    """A header and all frames of what is asked for. Raises AioRpcError.

    No header when something is missing, too much, or changed on its way.
    """
    stripes = min(link.down.count, frames)
    tasks = [asyncio.create_task(_stripe(link, request, number, stripes, frames)) for number in range(stripes)]
    try:
        parts = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    header, payloads = parts[0][0], list[Payload](b"" for _ in range(frames))
    for number, (told, share) in enumerate(parts):
        if header is None or told is None or (told.version, told.crc32c) != (header.version, header.crc32c):
            return None, []  # of a whole fragment, another version may have come between
        payloads[number::stripes] = share
    return header, payloads


async def _stripe(
    link: Link, request: pb.FetchRequest, number: int, stripes: int, frames: int
) -> tuple[pb.FetchHeader | None, list[Payload]]:
    """The frames of one call, and no header as soon as something is wrong."""
    mine, header, payloads = range(number, frames, stripes), None, list[Payload]()
    asked = pb.FetchRequest(stripe=number, stripes=stripes)
    asked.MergeFrom(request)
    lane = await link.down.take()
    try:
        call = lane.stub.Fetch(asked)  # what goes on after it was whole, or unsound, is not listened to
        with (
            link.transfers.of(call) as moved,
            link.down.carrying() as arrived,
        ):
            async for reply in call:
                moved()
                if isinstance(reply, pb.FetchReply) and reply.HasField("header") and header is None:
                    header = reply.header
                    continue
                frame = reply if isinstance(reply, WireFrame) else reply.frame
                payload, next_one = frame.payload, len(payloads)
                if next_one == len(mine) or frame.index != mine[next_one] or codec.crc32c(payload) != frame.crc32c:
                    return None, []
                payloads.append(payload)
                arrived(len(payload))
    finally:
        link.down.give(lane)
    return (header, payloads) if len(payloads) == len(mine) else (None, [])


async def _receipt(call: Any) -> pb.Receipt | None:  # noqa: ANN401 - gRPC's call
    while isinstance(reply := await call.read(), pb.PushReply):
        if reply.HasField("receipt"):
            return reply.receipt
    return None


def _give_up(helper: asyncio.Task[None], call: Any) -> None:  # noqa: ANN401 - gRPC's call
    """A stream failed, and frames with it: the core is asked again which it has."""
    if helper.cancelled() or helper.exception() is not None:
        call.cancel()


def _raise_of(helpers: Sequence[asyncio.Task[None]]) -> None:
    """Why the first stream was cancelled, if one of these failed."""
    for helper in helpers:
        if helper.done() and not helper.cancelled() and (error := helper.exception()) is not None:
            raise error


async def _raise_status(call: grpc.aio.StreamStreamCall[Any, Any]) -> NoReturn:
    """A write found the call ended: raises the status that it ended with."""
    raise grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )
