"""The gRPC service for `atoll doctor`. Calls are limited, because any process with a certificate may make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc

from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.processes.core import Core
from atoll_server.processes.core_process import CoreProcess
from atoll_server.rpc.calls import Context, abort, discard_rest

MAX_BYTES = 64 << 20  # limit on one call's padding in each direction
PIECE_BYTES = 256 << 10
PROBES = 2
IDLE_S, LONGEST_S = 10.0, 60.0  # limits in seconds on the time without a request and on the call's duration


class DoctorService(rpc.DoctorServicer):
    """Answers probes of the connection to this core."""

    def __init__(self, core: CoreProcess) -> None:
        self._core = core
        self._slots = asyncio.Semaphore(PROBES)

    async def Probe(self, requests: AsyncIterator[pb.ProbeRequest], context: Context) -> AsyncIterator[pb.ProbeReply]:
        """Answers each request until the call reaches a limit. The call then ends with RESOURCE_EXHAUSTED."""
        up = down = 0
        try:
            caller(context)
            if self._slots.locked():
                raise Refused(Status.RESOURCE_EXHAUSTED, f"{PROBES} probes are already running: try again in a minute")
            async with self._slots, asyncio.timeout(LONGEST_S):
                while (request := await self._next(requests)) is not None:
                    up, down = up + len(request.padding), down + request.wanted_bytes
                    if max(up, down) > MAX_BYTES:
                        raise Refused(
                            Status.RESOURCE_EXHAUSTED, f"a probe transfers at most {MAX_BYTES >> 20} MiB: request less"
                        )
                    yield self._answer()
                    for left in range(request.wanted_bytes, 0, -PIECE_BYTES):
                        yield pb.ProbeReply(padding=bytes(min(left, PIECE_BYTES)))
        except Refused as refused:
            await abort(context, refused)
        except TimeoutError:
            await abort(
                context,
                Refused(Status.RESOURCE_EXHAUSTED, f"a probe takes at most {LONGEST_S:.0f} s: use a faster link"),
            )
        finally:
            await discard_rest(requests)

    async def _next(self, requests: AsyncIterator[pb.ProbeRequest]) -> pb.ProbeRequest | None:
        try:
            async with asyncio.timeout(IDLE_S):
                return await anext(requests, None)
        except TimeoutError:
            return None

    def _answer(self) -> pb.ProbeReply:
        core = self._core.run
        others = self._core.run.attached.all() if isinstance(self._core, Core) else ()
        return pb.ProbeReply(
            wall_s=self._core.clock.wall(),
            run=core.run_id,
            message_bytes=self._core.settings.limits.message_bytes,
            fingerprint=core.layout.fingerprint if core.layout is not None else b"",
            frozen_digest=bytes.fromhex(core.frozen_digest),
            fragments=len(core.layout.fragments) if core.layout is not None else 0,
            shards=[each.address for each in others if each.address],
        )
