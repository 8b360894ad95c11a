"""What the dashboard asks of a core, as an operator: over one channel, dialled anew when certificates change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.access import Access
from atoll_wire.calling import opened

TIMEOUT_S = 5.0
SLOW_S = 300.0  # a checkpoint of a large model
MESSAGE_BYTES = 64 << 20  # of a status with thousands of learners
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that shows a token; none for none."""
    return (("authorization", f"Bearer {token}"),) if token else ()


class Core:
    """One core, or a front of it. token: this dashboard's own, for looking; acts are asked for with their caller's."""

    def __init__(self, address: str, access: Access, token: str) -> None:
        self.address = address
        self._access = access
        self._own = bearer(token)
        self._stamp: Any = None
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Hangs up."""
        for closing in self._closing:
            closing.cancel()
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> Any:  # noqa: ANN401 - grpc's stub, whose types are of its blocking kind
        stamp = self._access.stamp()
        if self._channel is None or stamp != self._stamp:
            old = self._channel
            self._channel = self._access.dial(self.address, OPTIONS)
            self._stamp = stamp
            if old is not None:  # what runs over it, a download perhaps, may end there
                self._closing.add(closing := asyncio.create_task(old.close(SLOW_S)))
                closing.add_done_callback(self._closing.discard)
        return rpc.OperatorStub(self._channel)

    async def status(self, token: str = "") -> pb.StatusReply:
        """The run at this moment. Every method raises grpc.aio.AioRpcError, AccessError for certificates."""
        shown = bearer(token) or self._own
        reply: pb.StatusReply = await self._stub().Status(pb.StatusRequest(), timeout=TIMEOUT_S, metadata=shown)
        return reply

    async def rounds(self, last: int, learner: str = "", *, brief: bool = False) -> list[pb.Round]:
        """The newest, newest first. brief: without answers."""
        request = pb.ListRoundsRequest(last=last, learner=learner, brief=brief)
        reply = await self._stub().ListRounds(request, timeout=TIMEOUT_S, metadata=self._own)
        return list(reply.rounds)

    async def events(self, log: int, after: int) -> pb.ListEventsReply:
        """Those after a position."""
        request = pb.ListEventsRequest(log=log, after=after)
        reply: pb.ListEventsReply = await self._stub().ListEvents(request, timeout=TIMEOUT_S, metadata=self._own)
        return reply

    async def receipts(self, learner: str, fate: pb.Fate, before: int, limit: int) -> list[pb.LoggedReceipt]:
        """Newest first."""
        request = pb.ListReceiptsRequest(learner=learner, fate=fate, before=before, limit=limit)
        reply = await self._stub().ListReceipts(request, timeout=TIMEOUT_S, metadata=self._own)
        return list(reply.receipts)

    async def checkpoints(self) -> list[pb.Checkpoint]:
        """Oldest first."""
        reply = await self._stub().ListCheckpoints(pb.ListCheckpointsRequest(), timeout=TIMEOUT_S, metadata=self._own)
        return list(reply.checkpoints)

    # ------------------------------------------------------------------------------ acts: with the caller's token

    async def pause(self, token: str, reason: str) -> None:
        """Or lets the run go on (no reason)."""
        await self._stub().Pause(pb.PauseRequest(reason=reason), timeout=TIMEOUT_S, metadata=bearer(token))

    async def evict(self, token: str, learner: str, reason: str) -> None:
        """Or lets it in again (no reason)."""
        request = pb.EvictRequest(learner=learner, reason=reason)
        await self._stub().Evict(request, timeout=TIMEOUT_S, metadata=bearer(token))

    async def take_checkpoint(self, token: str) -> pb.Checkpoint:
        """Answers when it is durable."""
        reply: pb.Checkpoint = await self._stub().TakeCheckpoint(
            pb.TakeCheckpointRequest(), timeout=SLOW_S, metadata=bearer(token)
        )
        return reply

    async def export(self, token: str) -> AsyncIterator[bytes]:
        """The published model as a safetensors file."""
        request = pb.ExportCheckpointRequest()
        with opened("ExportCheckpoint", self._stub().ExportCheckpoint(request, metadata=bearer(token))) as call:
            async for reply in call:
                yield reply.chunk
