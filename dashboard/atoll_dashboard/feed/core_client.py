"""The dashboard's calls to a core, over one channel. If the certificates change, a new channel replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.connections.calls import open_stream, unary_reply
from atoll_wire.connections.link import is_connection_lost
from atoll_wire.contract import token_metadata
from atoll_wire.security.handshake import tls_fault
from atoll_wire.security.transport import TransportSecurity
from google.protobuf.message import Message

TIMEOUT_S = 5.0
SLOW_S = 300.0  # timeout for taking a checkpoint of a large model
MESSAGE_BYTES = 64 << 20  # the largest reply: a status with thousands of learners
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


class CoreClient:
    """A client of a core or a front. token: the dashboard's own token, used only for reading.

    Methods for operator actions take the operator's token as an argument.

    Every method may raise grpc.aio.AioRpcError, LinkLost, or TransportSecurityError for unusable certificates.
    """

    def __init__(self, address: str, security: TransportSecurity, token: str) -> None:
        self.address = address
        self._security = security
        self._own = token_metadata(token)
        self._stamp: Any = None
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def tls_fault(self, error: grpc.RpcError) -> str:
        """Returns why TLS prevented a call, with the fix; empty if the call failed for another reason."""
        return await asyncio.to_thread(tls_fault, self.address, self._security) if is_connection_lost(error) else ""

    async def close(self) -> None:
        """Closes the channel."""
        for closing in self._closing:
            closing.cancel()
        if self._channel is not None:
            await self._channel.close()

    def _stub(self) -> Any:  # noqa: ANN401 - grpc's stub, whose types are those of blocking calls
        stamp = self._security.stamp()
        if self._channel is None or stamp != self._stamp:
            old = self._channel
            self._channel = self._security.dial(self.address, OPTIONS)
            self._stamp = stamp
            if old is not None:  # open calls, such as a download, may finish on the old channel
                self._closing.add(closing := asyncio.create_task(old.close(SLOW_S)))
                closing.add_done_callback(self._closing.discard)
        return rpc.OperatorStub(self._channel)

    async def _ask(
        self, method: str, request: Message, shown: tuple[tuple[str, str], ...], timeout_s: float = TIMEOUT_S
    ) -> Any:  # noqa: ANN401
        return await unary_reply(getattr(self._stub(), method)(request, timeout=timeout_s, metadata=shown))

    async def status(self, token: str = "") -> pb.StatusReply:
        """Returns the run's current state."""
        reply: pb.StatusReply = await self._ask("Status", pb.StatusRequest(), token_metadata(token) or self._own)
        return reply

    async def rounds(self, last: int, learner: str = "", *, brief: bool = False) -> list[pb.Round]:
        """Returns the newest rounds, newest first. brief: omit the answers."""
        request = pb.ListRoundsRequest(last=last, learner=learner, brief=brief)
        return list((await self._ask("ListRounds", request, self._own)).rounds)

    async def events(self, log: int, after: int) -> pb.ListEventsReply:
        """Returns the events after a position. log, after: see ListEventsRequest."""
        reply: pb.ListEventsReply = await self._ask("ListEvents", pb.ListEventsRequest(log=log, after=after), self._own)
        return reply

    async def receipts(self, learner: str, fate: pb.Fate, before: str, limit: int) -> pb.ListReceiptsReply:
        """Returns receipts, newest first. before: see ListReceiptsRequest."""
        request = pb.ListReceiptsRequest(learner=learner, fate=fate, before=before, limit=limit)
        reply: pb.ListReceiptsReply = await self._ask("ListReceipts", request, self._own)
        return reply

    async def checkpoints(self) -> list[pb.Checkpoint]:
        """Returns the checkpoints on disk, oldest first."""
        return list((await self._ask("ListCheckpoints", pb.ListCheckpointsRequest(), self._own)).checkpoints)

    # ------------------------------------------------------------------------------ actions, with the caller's token

    async def pause(self, token: str, reason: str) -> list[int]:
        """Pauses the run, or resumes it if `reason` is empty. Returns the shards that have not confirmed the change."""
        reply = await self._ask("Pause", pb.PauseRequest(reason=reason), token_metadata(token))
        return list(reply.unconfirmed)

    async def evict(self, token: str, learner: str, reason: str) -> list[int]:
        """Evicts a learner, or lets it join again if `reason` is empty. Returns the same shards as `pause`."""
        request = pb.EvictRequest(learner=learner, reason=reason)
        return list((await self._ask("Evict", request, token_metadata(token))).unconfirmed)

    async def take_checkpoint(self, token: str) -> pb.Checkpoint:
        """Takes a checkpoint and waits until it is durable."""
        reply: pb.Checkpoint = await self._ask(
            "TakeCheckpoint", pb.TakeCheckpointRequest(), token_metadata(token), SLOW_S
        )
        return reply

    async def export(self, token: str) -> AsyncIterator[bytes]:
        """Yields the published model as a safetensors file, in chunks."""
        request = pb.ExportCheckpointRequest()
        with open_stream(
            "ExportCheckpoint", self._stub().ExportCheckpoint(request, metadata=token_metadata(token))
        ) as call:
            async for reply in call:
                yield reply.chunk
