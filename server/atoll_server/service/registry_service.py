"""The registrar's gRPC service for shards that run as separate processes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from atoll_wire import outer_pb2 as pb
from atoll_wire import shards_pb2 as sh
from atoll_wire import shards_pb2_grpc
from atoll_wire.security.certificate import Role

from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.checkpoints.restore import INITIAL
from atoll_server.checkpoints.shard_part import part_chunks
from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_server.processes.core import Core
from atoll_server.rpc.calls import Context, InterruptibleWaits, abort, discard_rest
from atoll_server.run.attached_shards import AttachedShard
from atoll_server.run.outbox import Outbox

VIEW_S = 0.05  # shortest time between two views; newer views replace those that wait


class RegistryService(shards_pb2_grpc.RegistryServicer):
    """Attaches shards to the run."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._run = core.run
        self._waits = InterruptibleWaits()
        self._newest: dict[int, tuple[int, float]] = {}  # by shard: number and time of its newest event

    def stop(self) -> None:
        """Ends all calls, so that the shards attach to the next registrar process."""
        self._waits.end("the registrar is stopping: attach again")

    async def Attach(self, requests: AsyncIterator[sh.FromShard], context: Context) -> AsyncIterator[sh.FromRegistrar]:
        """Sends a shard the registrar's decisions and receives its summaries until either side ends the call."""
        run, wait = self._run, self._waits.begin()
        shard: AttachedShard | None = None
        box = Outbox()
        try:
            _check_core(context)
            first = await wait.first(requests, "an Attach stream")
            begun = run.shard is not None
            shard = run.attached.admit(first.hello, run.run_id, run.generation, epoch=run.epoch, begun=begun)
            await self._core.save_attached()
            welcome = self._core.welcome(shard.number)
            box = run.attached.welcome(shard, welcome, run.registry.entries.values(), run.view())
            receiving = asyncio.create_task(self._receive(requests, shard, box))
            try:
                while True:
                    async with wait():
                        message = await box.next()
                    if message is None:
                        break
                    yield message
                    if message.HasField("view"):
                        await asyncio.sleep(VIEW_S)
            finally:
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
        except Refused as refused:
            await abort(context, refused)
        finally:
            if shard is not None:
                run.attached.detach(shard, box)
            await discard_rest(requests)

    async def _receive(self, requests: AsyncIterator[sh.FromShard], shard: AttachedShard, box: Outbox) -> None:
        """Applies a shard's messages until its stream ends, then ends the call."""
        try:
            async for message in requests:
                if message.WhichOneof("what") == "event":
                    self._event(message.event, shard.number)
                else:
                    self._run.attached.heard(shard, box, message, self._run.registry)
        finally:
            box.end()

    def _event(self, event: pb.Event, shard: int) -> None:
        """Adds a shard's event, unless an earlier call has sent it.

        Each call begins with all events of the shard's process. Another process of the shard counts events from 1.
        """
        number, at = self._newest.get(shard, (0, 0.0))
        if event.number <= number and event.at <= at:
            return
        self._newest[shard] = event.number, event.at
        self._core.events.add(event, f"shard {shard}")

    async def FetchInitial(
        self, request: sh.FetchInitialRequest, context: Context
    ) -> AsyncIterator[sh.FetchInitialReply]:
        """Sends a shard's part of the initial parameters."""
        try:
            _check_core(context)
            shard = self._run.attached.shards.get(request.shard)
            layout = self._run.attached.layout
            if shard is None or layout is None:
                raise Refused(Status.UNAVAILABLE, "the run has no parameters yet: attach, and wait for them")
            if request.sha256 != self._run.attached.offered():
                raise Refused(Status.UNAVAILABLE, "newer initial parameters have arrived: attach again")
            file = await asyncio.to_thread(open_tensors, self._core.settings.directory / INITIAL, self._core.disk)
            digest, chunks = hashlib.sha256(), part_chunks(layout, file, shard.fragments)
            while chunk := await asyncio.to_thread(next, chunks, b""):
                digest.update(chunk)
                yield sh.FetchInitialReply(chunk=chunk)
            yield sh.FetchInitialReply(sha256=digest.digest())
        except Refused as refused:
            await abort(context, refused)


def _check_core(context: Context) -> None:
    """Raises Refused unless the caller has a core's certificate."""
    who = caller(context)
    if who.role not in {None, Role.CORE}:
        text = f"only a shard of the run may make this call, not {who}: use a core's certificate"
        raise Refused(Status.PERMISSION_DENIED, text)
