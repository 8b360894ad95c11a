"""The retry loop of uploads and fetches: wait for a session, try, and wait longer after each failure in a row."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost

from atoll.agent.call_errors import Remedy, backoff_s, detail, remedy
from atoll.agent.core_view import CoreView, FragmentTrack
from atoll.errors import LearnerError


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed try. session: the learner's when the try began; before: failures in a row before this one."""

    error: grpc.aio.AioRpcError
    remedy: Remedy
    session: pb.Session
    before: int


async def retry(
    core: CoreView,
    track: FragmentTrack,
    wanted: Callable[[], bool],
    once: Callable[[], Awaitable[bool]],
    failed: Callable[[Failure], bool],
    rng: random.Random,
    came: Callable[[], int] = lambda: 0,
) -> None:
    """Retries until a try succeeds, `wanted` is false, or the learner leaves.

    track: of the fragment; each try begins when its shard is connected.
    once: one try; returns whether it succeeded. It may raise AioRpcError and LinkLost.
    After LinkLost the next try waits only for a session over another link.
    failed: returns whether it applied the remedy, so that the next try need not wait.
    came: bytes that have arrived so far; a failure after progress counts as the first.
    Raises LearnerError when a core or front says that a retry cannot help.
    """
    failures = 0
    while wanted() and not core.leaving:
        shard = track.shard
        await shard.connected.wait()
        if track.shard is not shard:
            continue  # the run has other shards now
        if not wanted():  # such as when the run was restored meanwhile: old work is not sent
            return
        session, before, acted = shard.session, came(), False
        try:
            if await once():
                return
        except LinkLost:
            acted = True
        except grpc.aio.AioRpcError as error:
            failures = 0 if came() > before else failures
            failure = Failure(error, remedy(error), session, failures)
            acted = failed(failure)
            if failure.remedy is Remedy.STOP and wanted():
                raise LearnerError(detail(error)) from error
        if not acted:
            await asyncio.sleep(backoff_s(failures, rng))
        failures += 1
