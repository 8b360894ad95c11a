"""Announces a front to the registrar and reports its round-trip time and the bytes that it carried."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.connections.calls import LinkLost, open_stream, tolerate_ended_call
from atoll_wire.connections.link import Link, is_connection_lost
from atoll_wire.contract import HEARTBEAT_S

from atoll_server.front.answering import Answering
from atoll_server.front.metrics import FrontMetrics
from atoll_server.upstream.routes import Routes

log = structlog.get_logger()

ANSWER_S = 10.0  # seconds without an answer after which a call counts as disconnected
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 2.0
FAREWELL_S = 1.0  # timeout of the last report, in seconds


class Announcement:
    """Sends one front's reports. The registrar shows the front as silent when the reports stop."""

    def __init__(self, routes: Routes, metrics: FrontMetrics, region: str, answering: Answering) -> None:
        self._routes = routes
        self._metrics = metrics
        self._region = region
        self._answering = answering
        self._rng = random.Random()  # noqa: S311 - jitter
        self._answers = 0
        self._leaving = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._task = asyncio.create_task(self._keep())
        self._task.add_done_callback(_reported)

    async def end(self) -> None:
        """Tells the registrar that the front is stopping."""
        self._leaving.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=FAREWELL_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        """Makes one call after another until the front stops."""
        failures, refusal = 0, None
        while not self._leaving.is_set():
            link, answers = self._routes.core.link, self._answers
            try:
                await self._report_to(link)
            except (grpc.aio.AioRpcError, LinkLost, TimeoutError) as error:
                if isinstance(error, grpc.aio.AioRpcError) and not is_connection_lost(error):
                    if error.details() != refusal:
                        refusal = error.details()
                        core = self._routes.core.address
                        log.warning("the core refuses this front's reports", core=core, cause=refusal)
                else:
                    self._answering.answered(self._routes.registrar, up=False)
                    self._routes.core.suspect(link)
            if self._answers > answers:
                failures, refusal = 0, None
            longest_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 16))
            await self._rest(self._rng.uniform(0.5, 1.0) * longest_s)
            failures += 1

    async def _report_to(self, link: Link) -> None:
        """Sends reports over one call. Raises AioRpcError or LinkLost, or TimeoutError if the core does not answer."""
        core, connected, round_trip_s = self._routes.core, False, 0.0
        with (
            link.quick.use() as connection,
            open_stream("Announce", rpc.FrontsStub(connection.channel).Announce()) as call,
        ):
            while True:
                leaving, sent_at = self._leaving.is_set(), core.clock.monotonic()
                async with asyncio.timeout(ANSWER_S):
                    with tolerate_ended_call():
                        await call.write(self._report(round_trip_s, leaving=leaving))
                    reply = await call.read()
                if leaving or not isinstance(reply, pb.FrontReply):
                    return
                round_trip_s = core.clock.monotonic() - sent_at if connected else 0.0  # the first includes connecting
                connected = True
                self._answers += 1
                core.answered(link)
                self._answering.answered(self._routes.registrar, up=True)
                await self._rest(HEARTBEAT_S)

    def _report(self, round_trip_s: float, *, leaving: bool) -> pb.FrontReport:
        up, down = self._metrics.wan_bytes()
        return pb.FrontReport(
            nonce=self._routes.nonce,
            region=self._region,
            round_trip_s=round_trip_s,
            bytes_up=up,
            bytes_down=down,
            leaving=leaving,
        )

    async def _rest(self, seconds: float) -> None:
        """Waits for this time, or until the front stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()


def _reported(task: asyncio.Task[None]) -> None:
    """Logs the error of a task that ended unexpectedly."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the front no longer announces itself: report this bug", error=repr(error))
