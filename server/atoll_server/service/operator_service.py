"""The gRPC service for operators."""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.contract import FATE_NAMES

from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.access.tokens import OperatorTokens, operator_name
from atoll_server.checkpoints.export import write_checkpoint
from atoll_server.checkpoints.restore import LEDGER, initial_states
from atoll_server.rpc.calls import Context, abort
from atoll_server.run.core import Core
from atoll_server.run.summaries import checkpoint
from atoll_server.service.status import list_rounds, status
from atoll_server.shard.admission import MAX_NUMBER
from atoll_server.shard.contributions import receipt_of
from atoll_server.shard.shard import Shard
from atoll_server.storage import shard_ledger
from atoll_server.storage.rows import ContributionRow, FateRow
from atoll_server.telemetry import entries
from atoll_server.telemetry.events import event_message

CHUNK_BYTES = 1 << 20
NOTHING_YET = "the run has no parameters yet: start a learner first"
LARGEST_REASON = 200


class OperatorService(rpc.OperatorServicer):
    """The core's Operator service, which the dashboard and the `atoll` subcommands for operators call."""

    def __init__(self, core: Core, tokens: OperatorTokens | None = None) -> None:
        self._core = core
        self._tokens = tokens

    async def _may(self, context: Context, act: str = "") -> str:
        """Returns the calling operator's name. Ends the call with an error if the caller is not an operator.

        act: the requested action; empty for a read.
        """
        try:
            who = caller(context)
            name = operator_name(self._tokens, who, context.invocation_metadata() or ())
        except Refused as refused:
            self._core.run.record(entries.OperatorRefused(act, context.peer(), refused))
            await abort(context, refused)
        return name

    @contextlib.asynccontextmanager
    async def _acting(self, context: Context, act: str, **what: str) -> AsyncIterator[str]:
        """Context manager for an operator's action. Yields the operator's name.

        Records the action and its outcome in the journal. Ends the call with an error if the caller is not an operator,
        or if the action raises Refused. act: the action. what: the action's arguments.
        """
        name = await self._may(context, act)
        acted = entries.OperatorActed(act, name, context.peer(), what)
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

    def _shard(self) -> Shard:
        """Returns the core's shard. Raises Refused while the run has no parameters."""
        if (shard := self._core.run.shard) is None:
            raise Refused(Status.UNAVAILABLE, NOTHING_YET)
        return shard

    async def Status(self, _request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        await self._may(context)
        core = self._core
        return status(core.run, core.settings, core.facts(), core.watch.since)

    async def ListReceipts(self, request: pb.ListReceiptsRequest, context: Context) -> pb.ListReceiptsReply:
        """Returns contributions with their fates, newest first. Uses a separate connection to the ledger."""
        await self._may(context)
        most = self._core.settings.limits.receipts
        limit = min(request.limit or most, most)
        fate = FATE_NAMES.get(request.fate)
        before = min(request.before, MAX_NUMBER)
        rows = await asyncio.to_thread(self._receipts, request.learner, fate, before, limit)
        return pb.ListReceiptsReply(receipts=[logged_receipt(*row) for row in rows])

    def _receipts(self, *wanted: Any) -> list[tuple[int, ContributionRow, FateRow]]:  # noqa: ANN401
        with closing(self._core.disk.connect(self._core.settings.directory / LEDGER)) as db:
            db.execute("PRAGMA query_only=TRUE")
            return shard_ledger.receipts(db, *wanted)

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictReply:
        """Evicts a learner, or lets it join again if the reason is empty."""
        reason = request.reason[:LARGEST_REASON]
        tokens = request.tokens if request.HasField("tokens") else None
        what = {} if tokens is None else {"tokens": str(tokens)}
        act = "evict" if reason else "readmit"
        async with self._acting(context, act, learner=request.learner[:80], reason=reason, **what):
            evicting = asyncio.create_task(self._core.run.evict(request.learner, reason, tokens))
            await asyncio.shield(evicting)  # continues even if the operator disconnects
        return pb.EvictReply()

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseReply:
        """Pauses the run, or resumes it if the reason is empty. Resuming a run that is not paused has no effect."""
        reason = request.reason[:LARGEST_REASON]
        if not reason and not self._core.run.paused:
            await self._may(context, "resume")
            return pb.PauseReply()
        async with self._acting(context, "pause" if reason else "resume", reason=reason) as name:
            said = f"by {name or 'an operator'}: {reason}" if reason else ""
            await asyncio.shield(asyncio.create_task(self._core.run.pause(said)))
        return pb.PauseReply()

    async def ListRounds(self, request: pb.ListRoundsRequest, context: Context) -> pb.ListRoundsReply:
        """Returns the newest rounds, newest first."""
        await self._may(context)
        try:
            return list_rounds(self._core.run, self._core.timeline, request)
        except Refused as refused:
            await abort(context, refused)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Context) -> pb.ListEventsReply:
        """Returns the events after the newest event that the caller has seen."""
        await self._may(context)
        events = self._core.events
        return pb.ListEventsReply(log=events.log, events=map(event_message, events.after(request.log, request.after)))

    async def ListCheckpoints(self, _request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsReply:
        """Returns the snapshots on disk, oldest first."""
        await self._may(context)
        shard = self._core.run.shard
        return pb.ListCheckpointsReply(checkpoints=map(checkpoint, () if shard is None else shard.snapshots.all()))

    async def TakeCheckpoint(self, _request: pb.TakeCheckpointRequest, context: Context) -> pb.Checkpoint:
        """Takes a snapshot now, and replies when it is durable."""
        async with self._acting(context, "take a checkpoint"):
            try:
                taken = await self._shard().snapshots.take()
            except OSError as error:
                text = f"the snapshot cannot be written ({error}): free space on the core's disk"
                raise Refused(Status.RESOURCE_EXHAUSTED, text) from error
        return checkpoint(taken)

    async def ExportCheckpoint(
        self, request: pb.ExportCheckpointRequest, context: Context
    ) -> AsyncIterator[pb.ExportCheckpointReply]:
        """Streams the model, with its current published parameters or with its initial parameters."""
        async with self._acting(context, "export the model"):
            try:
                async with contextlib.aclosing(self._export(self._shard(), initial=request.initial)) as chunks:
                    async for chunk in chunks:
                        yield pb.ExportCheckpointReply(chunk=chunk)
            except OSError as error:
                text = f"the export cannot be written ({error.strerror}): free space on the core's disk"
                raise Refused(Status.RESOURCE_EXHAUSTED, text) from error

    async def _export(self, shard: Shard, *, initial: bool) -> AsyncGenerator[bytes]:
        """Yields the model's file in chunks.

        Raises Refused if a fragment cannot be read, or OSError if the disk fails.
        """
        with tempfile.TemporaryFile(dir=self._core.settings.directory) as file:
            # The states are released before streaming begins, since merges need their memory.
            async with contextlib.AsyncExitStack() as reading:
                if initial:
                    states = await asyncio.to_thread(initial_states, shard.layout, shard.initial)
                else:
                    states = {
                        index: await reading.enter_async_context(shard.readers.newest(fragment))
                        for index, fragment in shard.fragments.items()
                    }
                await asyncio.to_thread(write_checkpoint, file, shard.layout, shard.initial, states)
            file.seek(0)
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield chunk


def logged_receipt(number: int, row: ContributionRow, fate: FateRow) -> pb.LoggedReceipt:
    """Returns a contribution's ledger rows as a message. number: increases with each contribution to the run."""
    return pb.LoggedReceipt(
        number=number,
        receipt=receipt_of(fate),
        tokens=row.tokens,
        steps=row.steps,
        base_version=row.base_version,
        size_bytes=row.size_bytes,
        norm=math.sqrt(math.fsum(row.norms_sq)),
        clipped=row.scale,
        accepted_at=row.accepted_at,
    )
