"""The Operator service of a process with only a shard. The registrar answers operators for the whole run."""

from __future__ import annotations

from typing import Any

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc

from atoll_server.access.refusals import Refused, Status
from atoll_server.rpc.calls import Context, abort
from atoll_server.shard_process.shard_core import ShardCore


class ShardOperatorService(rpc.OperatorServicer):
    """Refuses operators' calls, which the registrar answers for the whole run."""

    def __init__(self, core: ShardCore) -> None:
        self._core = core

    async def Status(self, _request: pb.StatusRequest, context: Context) -> Any:  # noqa: ANN401
        await self._elsewhere(context)

    async def _elsewhere(self, context: Context) -> None:
        text = (
            f"this is shard {self._core.run.number} of the run: ask its registrar, at {self._core.settings.registrar}"
        )
        await abort(context, Refused(Status.FAILED_PRECONDITION, text))
