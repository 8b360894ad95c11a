"""The registrar's calls to the Operator services of the run's other shards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc.aio
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.connections.calls import LinkLost, unary_reply
from atoll_wire.connections.link import KEEPALIVE_OPTIONS
from atoll_wire.messages.message_parts import REPLY_BYTES
from atoll_wire.security.transport import TransportSecurity, TransportSecurityError
from google.protobuf.message import Message

from atoll_server.access.refusals import Refused, Status
from atoll_server.run.attached_shards import AttachedShards

ASK_S = 3.0  # timeout of a read in seconds, after which the answer omits this shard
FOR_REGISTRAR = (("atoll-registrar", "1"),)  # metadata that distinguishes the registrar's calls from operators' calls
OPTIONS = [*KEEPALIVE_OPTIONS, ("grpc.max_receive_message_length", REPLY_BYTES)]

# Opens a connection to a shard's address and yields its Operator stub.
DialShard: TypeAlias = Callable[[str], contextlib.AbstractAsyncContextManager[Any]]


def dial_shards(security: TransportSecurity) -> DialShard:
    """Returns the function that connects to a shard at HOST:PORT. security: credentials with a core's certificate."""

    @contextlib.asynccontextmanager
    async def dialled(address: str) -> AsyncIterator[Any]:
        async with security.dial(address, OPTIONS) as channel:
            yield rpc.OperatorStub(channel)

    return dialled


class ShardCalls:
    """Calls attached shards. Each call uses a new connection, because new certificates require one."""

    def __init__(self, attached: AttachedShards, connect: DialShard) -> None:
        self._attached = attached
        self._connect = connect

    @contextlib.asynccontextmanager
    async def to(self, number: int) -> AsyncIterator[Any]:
        """Context manager that yields a shard's stub. Raises Refused if the shard is not attached or a call fails."""
        shard = self._attached.shards.get(number)
        if shard is None or shard.outbox is None:
            raise Refused(Status.UNAVAILABLE, f"shard {number} is not attached: start it, then try again")
        try:
            async with self._connect(shard.address) as stub:
                yield stub
        except grpc.aio.AioRpcError as error:
            why = " ".join((error.details() or error.code().name).split())
            raise Refused(Status.UNAVAILABLE, f"a call to shard {number} at {shard.address} failed: {why}") from error
        except (LinkLost, TransportSecurityError) as error:
            raise Refused(Status.UNAVAILABLE, f"shard {number} at {shard.address} cannot be called: {error}") from error

    async def ask(self, number: int, method: str, request: Message, timeout_s: float = ASK_S) -> Any:  # noqa: ANN401
        """Returns a shard's reply. Raises Refused if the shard does not reply."""
        async with self.to(number) as stub:
            return await unary_reply(getattr(stub, method)(request, timeout=timeout_s, metadata=FOR_REGISTRAR))

    async def ask_all(self, method: str, request: Message) -> tuple[dict[int, Any], list[int]]:
        """Returns the replies of all other shards, keyed by number, and the numbers of shards that did not reply."""
        numbers = list(self._attached.remote)
        answers = await asyncio.gather(*(self._read(number, method, request) for number in numbers))
        replies = {number: each for number, each in zip(numbers, answers, strict=True) if each is not None}
        return replies, [number for number in numbers if number not in replies]

    async def _read(self, number: int, method: str, request: Message) -> Any | None:  # noqa: ANN401
        """Returns a shard's reply, or None if the shard does not answer. The caller then informs the operator."""
        try:
            return await self.ask(number, method, request)
        except Refused:
            return None
