"""Follows the run and its newest versions on behalf of a front's readers, with one watch per core address.

The front watches while it has readers. It describes the run from memory, so additional readers cause no load on the
core.
"""

from __future__ import annotations

import asyncio
import random

import grpc
import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost, open_stream, unary_reply
from atoll_wire.connections.link import is_atoll_status, is_connection_lost
from atoll_wire.contract import PROTOCOL

from atoll_server.access.refusals import Refused, Status
from atoll_server.front.region_fetches import RegionFetches
from atoll_server.rpc.calls import InterruptibleWait, InterruptibleWaits
from atoll_server.rpc.version_board import VersionBoard
from atoll_server.upstream.core_connection import CoreConnection
from atoll_server.upstream.routes import Routes

log = structlog.get_logger()

ASK_S = 60.0  # timeout of Describe, in seconds; the core may be restoring a run
SILENT_S = 20.0  # seconds without a message after which a watch counts as disconnected
REST_S = 60.0  # seconds without readers after which the front stops watching
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 10.0
ELSEWHERE = 3  # failures after which the shard may have another address
AGAIN = "the run has a new generation or other shards: call Describe again"


class RegionReads:
    """The readers' view of the run. board: the board that shows the newest versions."""

    def __init__(self, routes: Routes, fetching: RegionFetches) -> None:
        self.board = VersionBoard()
        self._routes = routes
        self._fetching = fetching
        self._rng = random.Random()  # noqa: S311 - jitter
        self._run: pb.DescribeReply | None = None
        self._asking: asyncio.Task[pb.DescribeReply] | None = None
        self._watches: dict[CoreConnection, asyncio.Task[None]] = {}
        self._waits = InterruptibleWaits()
        self._used_at = 0.0
        self._stopping = ""

    async def describe(self) -> pb.DescribeReply:
        """Returns the run, with this front as the address of all shards. All readers share one call to the core.

        Raises Refused, LinkLost or the call's AioRpcError.
        """
        self._used_at = self._routes.clock.monotonic()
        if self._run is not None:
            return self._run
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[pb.DescribeReply]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # the readers that wait raise it

    def described(self, run: str, generation: int) -> pb.DescribeReply:
        """Returns the run's description. Raises Refused if the run has another name or generation."""
        self._used_at = self._routes.clock.monotonic()
        if self._run is None or (self._run.run, self._run.generation) != (run, generation):
            raise Refused(Status.UNAUTHENTICATED, AGAIN)
        return self._run

    def waiting(self) -> InterruptibleWait:
        """Returns the waits for a reader's watch. They end when the reader must call Describe again."""
        wait = self._waits.begin()
        if self._stopping:
            wait.end(Refused(Status.UNAVAILABLE, self._stopping))
        return wait

    def stop(self, why: str) -> None:
        """Ends all readers' watches, including those that begin later. why: the message to readers."""
        self._stopping = why
        self._waits.end(why)

    async def end(self) -> None:
        """Cancels all watches of the core and waits until they have ended."""
        tasks = [*self._watches.values(), *([self._asking] if self._asking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------ the core's side

    async def _ask(self) -> pb.DescribeReply:
        """Describes the run and begins to watch its addresses."""
        core = self._routes.core
        link = core.link
        with link.quick.use() as connection:
            request = pb.DescribeRequest(protocol=PROTOCOL)
            reply: pb.DescribeReply = await unary_reply(connection.stub.Describe(request, timeout=ASK_S))
        core.answered(link)
        await self._routes.placed(reply)
        if self._run != reply:
            if self._run is not None:
                self._forget()
            self._run = reply
        for address in self._routes.addresses:
            if address not in self._watches:
                self._watches[address] = task = asyncio.create_task(self._watch(address, self._run))
                task.add_done_callback(_reported)
        for address in [each for each in self._watches if each not in self._routes.addresses]:
            self._watches.pop(address).cancel()
        return self._run

    def _forget(self) -> None:
        """Ends this front's watches and the readers' watches. The readers then call Describe again."""
        self._run = None
        self.board.clear()
        waits, self._waits = self._waits, InterruptibleWaits()
        waits.end(AGAIN)
        here = asyncio.current_task()
        for task in self._watches.values():
            if task is not here:
                task.cancel()
        self._watches.clear()

    async def _watch(self, address: CoreConnection, run: pb.DescribeReply) -> None:
        """Shows the versions of the shards at an address as long as this front has readers of this run."""
        failures = 0
        while self._wanted(run):
            link = address.link
            try:
                with (
                    link.quick.use() as connection,
                    open_stream("Watch", connection.stub.Watch(_request(run))) as call,
                ):
                    while self._wanted(run):
                        async with asyncio.timeout(SILENT_S):
                            reply = await call.read()
                        if not isinstance(reply, pb.WatchReply):
                            break
                        address.answered(link)
                        failures = 0
                        if reply.log:
                            self._heard(run, reply)
            except grpc.aio.AioRpcError as error:
                if is_connection_lost(error):
                    address.suspect(link)
                if error.code() is grpc.StatusCode.UNAUTHENTICATED and is_atoll_status(error):
                    self._forget()
                    return
            except TimeoutError:
                address.suspect(link)
            except LinkLost:
                pass  # the next attempt uses a new link
            longest_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures, 16))
            await asyncio.sleep(self._rng.uniform(0.5, 1.0) * longest_s)
            failures += 1
            if failures % ELSEWHERE == 0 and self._asking is None:
                self._asking = asyncio.create_task(self._ask())  # a shard may have another address now
                self._asking.add_done_callback(self._asked)
        if self._run is run:
            self._forget()

    def _wanted(self, run: pb.DescribeReply) -> bool:
        """Returns whether this front still has readers of this run."""
        now = self._routes.clock.monotonic()
        if self.board.watching:
            self._used_at = now
        return self._run is run and now - self._used_at < REST_S

    def _heard(self, run: pb.DescribeReply, reply: pb.WatchReply) -> None:
        """Shows a shard's newer versions to the readers. Cached items of an older history are dropped first."""
        shard = self._routes.numbered(run, reply.shard)
        pairs = [(each.fragment, each.version) for each in reply.versions]
        self._fetching.announced(shard, reply.log, run.run, run.generation, pairs)
        self.board.show(reply.shard, reply.log, reply.versions)


def _request(run: pb.DescribeReply) -> pb.WatchRequest:
    return pb.WatchRequest(run=run.run, generation=run.generation)


def _reported(task: asyncio.Task[None]) -> None:
    """Logs the error of a watch that ended unexpectedly."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a watch of the core failed: report this bug", error=repr(error))
