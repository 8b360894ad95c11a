"""The Operator service of a process with only a shard.

The registrar answers operators for the whole run. This service answers only the registrar, for one shard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.security.certificate import Role

from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.operators.model_export import export_part, replies
from atoll_server.operators.receipt_pages import shard_page
from atoll_server.operators.run_checkpoints import take_snapshot
from atoll_server.operators.shard_calls import FOR_REGISTRAR
from atoll_server.operators.status import list_rounds
from atoll_server.processes.shard_core import ShardCore
from atoll_server.rpc.calls import Context, abort


class ShardOperatorService(rpc.OperatorServicer):
    """Answers the registrar. Refuses operators' calls with a message that names the registrar."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    @contextlib.asynccontextmanager
    async def _answering(self, context: Context) -> AsyncIterator[None]:
        """Context manager for a call of the registrar. Ends calls of operators and calls whose body raises Refused."""
        try:
            who = caller(context)
            if who.role not in {None, Role.CORE} or not set(FOR_REGISTRAR) <= set(context.invocation_metadata() or ()):
                raise self._elsewhere()
            yield
        except Refused as refused:
            await abort(context, refused)

    def _elsewhere(self) -> Refused:
        where = f"ask its registrar, at {self._core.settings.registrar}"
        return Refused(Status.FAILED_PRECONDITION, f"this is shard {self._core.run.number} of the run: {where}")

    async def _refuse(self, _request: object, context: Context) -> NoReturn:
        await abort(context, self._elsewhere())

    Status = ListCheckpoints = ListEvents = Evict = Pause = _refuse

    async def ListReceipts(self, request: pb.ListReceiptsRequest, context: Context) -> Any:  # noqa: ANN401
        async with self._answering(context):
            return await asyncio.to_thread(shard_page, self._core, request)

    async def ListRounds(self, request: pb.ListRoundsRequest, context: Context) -> Any:  # noqa: ANN401
        async with self._answering(context):
            return list_rounds(self._core.run, self._core.timeline, request)

    async def TakeCheckpoint(self, request: pb.TakeCheckpointRequest, context: Context) -> Any:  # noqa: ANN401
        """Takes a snapshot and keeps it, since a checkpoint of the run may name it."""
        async with self._answering(context):
            shard = self._core.run.running()
            await shard.snapshots.keep_only(request.named)
            return await take_snapshot(shard, keep=True)

    async def ExportCheckpoint(
        self, request: pb.ExportCheckpointRequest, context: Context
    ) -> AsyncIterator[pb.ExportCheckpointReply]:
        """Streams one fragment of this shard."""
        async with self._answering(context):
            chunks = export_part(self._core.run.running(), request.fragment, self._core.settings.directory)
            async with contextlib.aclosing(replies(chunks)) as messages:
                async for message in messages:
                    yield message
