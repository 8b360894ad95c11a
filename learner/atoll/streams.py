"""One contribution over as many connections as there are: each takes the next frame from one queue when it can."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc.aio
from atoll_wire import outer_pb2 as pb

from atoll.transport import Link


async def upload(
    link: Link, header: pb.PushHeader, messages: Sequence[bytes], sent: Callable[[int], None], *, fresh: bool
) -> pb.Receipt | None:
    """Offers a contribution, sends the frames that the core lacks, and returns its answer, if it gives one.

    messages: of all frames; sent: told the index of each that was handed over. fresh: it was never offered, so the core
    has none of them, and nobody waits a round trip to hear that. Raises AioRpcError.
    """
    lane = await link.lanes.take()
    call, helpers = lane.stub.Push(), list[asyncio.Task[None]]()
    with link.transfers.of(call) as moved:
        try:
            try:
                await call.write(pb.PushRequest(header=header))
                reply = None if fresh else await call.read()
                have = set(reply.have.frames) if isinstance(reply, pb.PushReply) else set()
                if isinstance(reply, pb.PushReply) and reply.HasField("receipt"):
                    return reply.receipt
                left = deque(index for index in range(len(messages)) if index not in have)
                stream = _Stream(link, header, messages, left, sent)
                for _ in range(min(link.lanes.count, len(left)) - 1):
                    helpers.append(asyncio.create_task(stream.help()))
                    helpers[-1].add_done_callback(lambda helper: _give_up(helper, call))
                await stream.send(call, moved)
            finally:
                link.lanes.give(lane)
            return await _receipt(call)
        except asyncio.InvalidStateError:
            await _raise_status(call)
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
        lane = await self._link.lanes.take()
        call = lane.stub.Push() if self._left else None
        if call is None:
            self._link.lanes.give(lane)
            return
        with self._link.transfers.of(call) as moved:
            try:
                await call.write(pb.PushRequest(header=self._header))
                await self.send(call, moved)
            finally:
                self._link.lanes.give(lane)
            await _receipt(call)  # what it sent is there; the first stream hears the same

    async def send(self, call: Any, moved: Callable[[], None]) -> None:  # noqa: ANN401 - gRPC's call
        """Frames, until none is left."""
        while self._left:
            index = self._left.popleft()
            await call.write(self._messages[index])
            self._sent(index)
            self._link.lanes.moved(len(self._messages[index]))
            moved()
        await call.done_writing()


async def _receipt(call: Any) -> pb.Receipt | None:  # noqa: ANN401 - gRPC's call
    while isinstance(reply := await call.read(), pb.PushReply):
        if reply.HasField("receipt"):
            return reply.receipt
    return None


def _give_up(helper: asyncio.Task[None], call: Any) -> None:  # noqa: ANN401 - gRPC's call
    """A stream failed, and frames with it: the core is asked again which it has."""
    if not helper.cancelled() and helper.exception() is not None:
        call.cancel()


async def _raise_status(call: grpc.aio.StreamStreamCall[Any, Any]) -> NoReturn:
    """A write found the call ended: raises the status that it ended with."""
    raise grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), details=await call.details()
    )
