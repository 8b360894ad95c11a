"""The gRPC service for operators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc

from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.access.tokens import OperatorTokens, operator_name, viewer_name
from atoll_server.operators.model_export import export_model, replies
from atoll_server.operators.receipt_pages import joined_page, shard_page
from atoll_server.operators.run_checkpoints import RunCheckpoints
from atoll_server.operators.shard_calls import ShardCalls
from atoll_server.operators.status import joined_rounds, list_rounds, status
from atoll_server.processes.core import Core
from atoll_server.rpc.calls import Context, abort
from atoll_server.telemetry import entries
from atoll_server.telemetry.events import event_message

NOTHING_YET = "the run has no parameters yet: start a learner first"
LARGEST_REASON = 200


class OperatorService(rpc.OperatorServicer):
    """The core's Operator service, which the dashboard and the `atoll` subcommands for operators call."""

    def __init__(
        self, core: Core, calls: ShardCalls, checkpoints: RunCheckpoints, tokens: OperatorTokens | None = None
    ) -> None:
        """calls: calls to the run's other shards. checkpoints: the run's checkpoints."""
        self._core = core
        self._calls = calls
        self._checkpoints = checkpoints
        self._tokens = tokens

    async def _may(self, context: Context, act: str = "") -> str:
        """Returns the caller's name. Ends the call unless the caller is an operator, or a viewer who reads.

        act: name of the requested action; empty for a read.
        """
        allowed = operator_name if act else viewer_name
        try:
            name = allowed(self._tokens, caller(context), context.invocation_metadata() or ())
        except Refused as refused:
            self._core.run.record(entries.OperatorRefused(act, context.peer(), refused))
            await abort(context, refused)
        return name

    @contextlib.asynccontextmanager
    async def _acting(self, context: Context, act: str, **what: str) -> AsyncIterator[str]:
        """Context manager for an operator's action. Yields the operator's name.

        Records the action and its outcome in the journal. Ends the call with an error if the caller is not an operator,
        or if the action raises Refused. act: name of the action. what: arguments of the action; empty ones are omitted.
        """
        name = await self._may(context, act)
        given = {key: value for key, value in what.items() if value}
        acted = entries.OperatorActed(act, name, context.peer(), given)
        try:
            yield name
        except Refused as refused:
            acted = replace(acted, status=refused.status.value, detail=refused.detail)
            await abort(context, refused)
        except (asyncio.CancelledError, GeneratorExit):
            acted = replace(acted, status="cancelled", detail="the call ended before the action had a result")
            raise
        except Exception as error:
            acted = replace(acted, status="unknown", detail=str(error))
            raise
        finally:
            self._core.run.record(acted)

    async def Status(self, _request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        await self._may(context)
        core = self._core
        return status(core.run, core.settings, core.facts(), core.watch.since)

    async def ListReceipts(self, request: pb.ListReceiptsRequest, context: Context) -> pb.ListReceiptsReply:
        """Returns the contributions to all shards with their fates, newest first."""
        await self._may(context)
        try:
            own = await asyncio.to_thread(shard_page, self._core, request)
        except Refused as refused:
            await abort(context, refused)
        others, missing = await self._calls.ask_all("ListReceipts", request)
        return joined_page({self._core.run.number: own} | others, missing, request, self._core.settings.limits.receipts)

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictReply:
        """Evicts a learner, lets it join again if the reason is empty, or records that its process is gone."""
        if request.gone:
            async with self._acting(context, "gone", learner=request.learner[:80]):
                late = await asyncio.shield(asyncio.create_task(self._core.run.gone(request.learner)))
            return pb.EvictReply(unconfirmed=late)
        reason = request.reason[:LARGEST_REASON]
        tokens = request.tokens if request.HasField("tokens") else None
        what = {} if tokens is None else {"tokens": str(tokens)}
        act = "evict" if reason else "readmit"
        async with self._acting(context, act, learner=request.learner[:80], reason=reason, **what):
            evicting = asyncio.create_task(self._core.run.evict(request.learner, reason, tokens))
            late = await asyncio.shield(evicting)  # continues even if the operator disconnects
        return pb.EvictReply(unconfirmed=late)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseReply:
        """Pauses the run, or resumes it if the reason is empty. Resuming a run that is not paused has no effect."""
        reason = request.reason[:LARGEST_REASON]
        if not reason and not self._core.run.paused:
            await self._may(context, "resume")
            return pb.PauseReply()
        async with self._acting(context, "pause" if reason else "resume", reason=reason) as name:
            said = f"by {name or 'an operator'}: {reason}" if reason else ""
            late = await asyncio.shield(asyncio.create_task(self._core.run.pause(said)))
        return pb.PauseReply(unconfirmed=late)

    async def ListRounds(self, request: pb.ListRoundsRequest, context: Context) -> pb.ListRoundsReply:
        """Returns the newest rounds of all shards, newest first."""
        await self._may(context)
        try:
            own = list_rounds(self._core.run, self._core.timeline, request)
        except Refused as refused:
            await abort(context, refused)
        others, missing = await self._calls.ask_all("ListRounds", request)
        return joined_rounds([own, *others.values()], missing, request)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Context) -> pb.ListEventsReply:
        """Returns the events after the last event that the caller has seen."""
        await self._may(context)
        events = self._core.events
        return pb.ListEventsReply(log=events.log, events=map(event_message, events.after(request.log, request.after)))

    async def ListCheckpoints(self, _request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsReply:
        """Returns the checkpoints that can be restored, oldest first."""
        await self._may(context)
        return pb.ListCheckpointsReply(checkpoints=self._checkpoints.all())

    async def TakeCheckpoint(self, _request: pb.TakeCheckpointRequest, context: Context) -> pb.Checkpoint:
        """Takes a checkpoint of all shards and replies when it is durable."""
        async with self._acting(context, "take a checkpoint"):
            return await self._checkpoints.take()

    async def ExportCheckpoint(
        self, request: pb.ExportCheckpointRequest, context: Context
    ) -> AsyncIterator[pb.ExportCheckpointReply]:
        """Streams the model with either its current published parameters or its initial parameters."""
        core = self._core
        async with self._acting(context, "export the model"):
            if core.run.shard is None:
                raise Refused(Status.UNAVAILABLE, NOTHING_YET)
            chunks = export_model(core.run, self._calls, core.settings.directory, initial=request.initial)
            async with contextlib.aclosing(replies(chunks)) as messages:
                async for message in messages:
                    yield message
