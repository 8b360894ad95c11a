"""Exports the published model from the shard in this process and from all other shards."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO

from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import open_stream
from atoll_wire.layout.layout import FragmentLayout
from atoll_wire.model_file.model_file import RunId

from atoll_server.access.refusals import Refused, Status
from atoll_server.checkpoints.model_data import ModelData, PartError, write_part
from atoll_server.checkpoints.restore import initial_state
from atoll_server.operators.shard_calls import FOR_REGISTRAR, ShardCalls
from atoll_server.run.registrar import Registrar
from atoll_server.shard.shard import Shard

CHUNK_BYTES = 1 << 20


async def export_model(run: Registrar, calls: ShardCalls, directory: Path, *, initial: bool) -> AsyncGenerator[bytes]:
    """Yields the whole model's file in chunks. initial: whether to export the initial parameters, not the current ones.

    The model is collected in a temporary file in `directory`, one fragment at a time. Raises Refused if a fragment
    cannot be read, or OSError if the disk fails.
    """
    own = run.running()
    with tempfile.TemporaryFile(dir=directory) as file:
        model = ModelData(file, own.layout, own.initial, RunId(run.run_id, run.generation))
        await asyncio.to_thread(model.copy_fixed)
        if initial:
            for fragment in own.layout.fragments:
                state = await asyncio.to_thread(initial_state, own.layout, own.initial, fragment)
                await asyncio.to_thread(model.add, fragment, state)
        else:
            await _collect(run, own, calls, model)
        yield model.header()
        async for chunk in _chunks(file):
            yield chunk


async def _collect(run: Registrar, own: Shard, calls: ShardCalls, model: ModelData) -> None:
    """Adds all fragments. Releases each fragment before reading the next one, since merges need the memory."""
    for held in own.fragments.values():
        async with own.readers.newest(held) as state:
            await asyncio.to_thread(model.add, held.place, state)
    for number in run.attached.remote:
        for index in run.attached.fragments(own.layout, number):
            await _fetch(calls, number, own.layout.fragments[index], model)


async def _fetch(calls: ShardCalls, number: int, fragment: FragmentLayout, model: ModelData) -> None:
    """Adds a fragment of another shard. Raises Refused if the shard does not send it."""
    part = model.part(fragment)
    request = pb.ExportCheckpointRequest(fragment=fragment.index)
    try:
        async with calls.to(number) as stub:
            with open_stream("ExportCheckpoint", stub.ExportCheckpoint(request, metadata=FOR_REGISTRAR)) as call:
                async for reply in call:
                    await asyncio.to_thread(part.take, reply.chunk)
        part.finish()
    except PartError as error:
        raise Refused(Status.UNAVAILABLE, f"shard {number} sent an invalid export ({error}): try again") from error


async def export_part(shard: Shard, fragment: int, directory: Path) -> AsyncGenerator[bytes]:
    """Yields one fragment of this process's shard as a part, in chunks. Raises Refused or OSError."""
    if (held := shard.fragments.get(fragment)) is None:
        raise Refused(Status.INVALID_ARGUMENT, f"this shard does not hold fragment {fragment}: ask another shard")
    with tempfile.TemporaryFile(dir=directory) as file:
        async with shard.readers.newest(held) as state:
            await asyncio.to_thread(write_part, file, shard.layout, held.place, state)
        # The state is released before streaming begins, since merges need its memory.
        async for chunk in _chunks(file):
            yield chunk


async def _chunks(file: BinaryIO) -> AsyncGenerator[bytes]:
    file.seek(0)
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk


async def replies(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[pb.ExportCheckpointReply]:
    """Yields chunks as messages. Raises Refused if the disk fails, and passes on the errors of `chunks`."""
    try:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield pb.ExportCheckpointReply(chunk=chunk)
    except OSError as error:
        text = f"the export cannot be written ({error.strerror}): check the core's disk and its free space"
        raise Refused(Status.RESOURCE_EXHAUSTED, text) from error
