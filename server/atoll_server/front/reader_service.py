"""A front's gRPC service for readers. The front checks readers itself and answers from memory where it can."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.contract import PROTOCOL
from atoll_wire.messages.frame_messages import Sent
from atoll_wire.security.certificate import Role

from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.front.answering import Answering
from atoll_server.front.metrics import FrontMetrics
from atoll_server.front.region_fetches import RegionFetches
from atoll_server.front.region_reads import RegionReads
from atoll_server.rpc.calls import Context
from atoll_server.rpc.reader_slots import ReaderSlots
from atoll_server.upstream.routes import Routes


class FrontReaderService(rpc.ReaderServicer):
    """The Reader service for a region's readers. slots: limits on the calls of all readers together."""

    def __init__(
        self,
        routes: Routes,
        fetching: RegionFetches,
        reads: RegionReads,
        slots: ReaderSlots,
        metrics: FrontMetrics,
        answering: Answering,
    ) -> None:
        self._routes = routes
        self._fetching = fetching
        self._reads = reads
        self._slots = slots
        self._answering = answering
        metrics.readers.set_function(lambda: reads.board.watching)

    def stop(self) -> None:
        """Ends all watches, so that readers reconnect."""
        self._reads.stop("this front is stopping: watch this or another address again")

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        """Describes the run and gives this front as the address of all shards."""
        async with self._answering(context, self._routes.registrar):
            _check_reader(context)
            if request.protocol != PROTOCOL:
                text = f"the reader uses protocol {request.protocol}, but this front uses {PROTOCOL}"
                raise Refused(Status.FAILED_PRECONDITION, f"{text}: use the same version of Atoll on both sides")
            return await self._reads.describe()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchReply]:
        """Sends the newest versions of all shards, which this front receives through its own watches."""
        async with self._answering(context):
            _check_reader(context)
            self._reads.described(request.run, request.generation)
            wait = self._reads.waiting()
            with self._slots.watching():
                async with aclosing(self._reads.board.watch()) as replies:
                    while (reply := await wait.next(replies)) is not None:
                        yield reply

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[Sent]:
        """Answers from the front's cache or with the core's replies."""
        async with self._answering(context, self._routes.owner(request, request.fragment)):
            _check_reader(context)
            run = self._reads.described(request.run, request.generation)
            async with self._slots.reading():
                newest = self._reads.board.newest(request.fragment)
                async with aclosing(self._fetching.read(request, newest, run.fixed_frames)) as replies:
                    async for reply in replies:
                        yield reply


def _check_reader(context: Context) -> None:
    """Raises Refused unless the caller may read. The core relies on this check."""
    who = caller(context)
    if who.role not in {None, Role.READER, Role.OPERATOR}:
        text = f"this call is for readers, not for {who}: use a reader's certificate (atoll certs issue reader NAME)"
        raise Refused(Status.PERMISSION_DENIED, text)
