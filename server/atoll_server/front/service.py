"""A front's gRPC service. It passes learners' calls on to the core, which makes all decisions about a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.codec.checksums import crc32c
from atoll_wire.connections.calls import open_stream, tolerate_ended_call, unary_reply
from atoll_wire.contract import JOIN_S
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import Pushed, Sent
from atoll_wire.process.logs import contribution_name
from atoll_wire.security.certificate import Role, brief

from atoll_server.access.identity import Caller, caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.front.answering import Answering
from atoll_server.front.metrics import FrontMetrics
from atoll_server.front.region_fetches import RegionFetches
from atoll_server.rpc.calls import Context, InterruptibleWaits, discard_rest
from atoll_server.upstream.routes import Routes

log = structlog.get_logger()

QUICK_S = 20.0


class FrontService(rpc.OuterServicer):
    """The Outer service for a region's learners. cache_bytes: limit on cached updates and whole fragments."""

    def __init__(self, routes: Routes, metrics: FrontMetrics, cache_bytes: int, answering: Answering) -> None:
        self._routes = routes
        self._metrics = metrics
        self._answering = answering
        self.fetching = RegionFetches(routes, metrics, cache_bytes)
        self._waits = InterruptibleWaits()
        self._stopping = False

    def stop(self) -> None:
        """Ends all long calls and tells the learners that have an open Follow call to reconnect."""
        self._stopping = True
        self._waits.end("this front is stopping: reconnect to this or another front")

    # ------------------------------------------------------------------------------ calls passed on unchanged

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        """Passes a Join on to the core. Remembers the session and the shards from the core's reply."""
        core = self._routes.core
        async with self._answering(context):
            request.fleet = self._may(context, request.learner).fleet  # the core sees only the front's certificate
            began = core.clock.monotonic()
            link = core.link
            with link.quick.use() as connection:
                reply: pb.JoinReply = await unary_reply(connection.stub.Join(request, timeout=JOIN_S))
            link.answered(core.clock.monotonic() - began)
            core.answered(link)
            if reply.state == pb.JoinReply.STATE_READY:
                await self._routes.placed(reply)
            if reply.settings.compression == pb.COMPRESSION_AUTO:  # the learner does not know the link to the core
                reply.settings.compression = pb.COMPRESSION_ALWAYS
            session = pb.Session(
                run=reply.run,
                learner=request.learner,
                incarnation=reply.incarnation,
                generation=reply.generation,
                token=reply.token,
            )
            if reply.state != pb.JoinReply.STATE_CONFIRM:
                near = self._routes.near(session)
                versions = [each for each in reply.versions.items() if each[0] in (near.fragments or ())]
                self.fetching.told(near, reply.log, session, versions)
                log.info("joined", learner=request.learner, incarnation=reply.incarnation, region=request.region)
            return reply

    async def Initialise(self, requests: AsyncIterator[pb.InitialiseRequest], context: Context) -> pb.InitialiseReply:
        """Passes the initial parameters on to the core."""
        wait = self._waits.begin()
        async with self._answering(context):
            try:
                header = await wait.first(requests, "an Initialise stream")
                self._may(context, header.header.session.learner)
                link = self._routes.core.link
                with (
                    link.carriers.use() as connection,
                    open_stream("Initialise", connection.stub.Initialise()) as call,
                    link.transfers.of(call) as moved,
                ):

                    async def pass_on() -> None:
                        with tolerate_ended_call():
                            await call.write(header)
                            async for request in requests:
                                self._metrics.whole_up.inc(len(request.chunk))
                                await call.write(request)
                                moved()
                            await call.done_writing()

                    async with _beside(call, pass_on()), wait():
                        reply: pb.InitialiseReply = await call
                return reply
            finally:
                await discard_rest(requests)

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.Notification]:
        """Passes a shard's notifications on until the shard, the learner or this front ends the call."""
        shard = self._routes.numbered(request.session, request.shard)
        async with self._answering(context, shard, request.session) as route:
            self._may(context, request.session.learner)
            request.front = self._routes.nonce
            wait = self._waits.begin()
            with (
                route.link.quick.use() as connection,
                open_stream("Follow", connection.stub.Follow(request)) as call,
            ):
                try:
                    while (notification := await wait.next(aiter(call))) is not None:
                        self.fetching.told(shard, notification.log, request.session, _versions(notification))
                        self._answering.answered(shard, up=True)
                        shard.core_connection.answered(route.link)
                        yield notification
                except Refused:
                    if not self._stopping:
                        raise
                    yield pb.Notification(shutting_down=pb.ShuttingDown())

    async def Report(self, requests: AsyncIterator[pb.Progress], context: Context) -> pb.ReportReply:
        """Passes a learner's progress reports on to a shard."""
        wait = self._waits.begin()
        async with self._answering(context) as route:
            try:
                first = await wait.first(requests, "a Report stream")
                self._may(context, first.session.learner)
                link = route.to(self._routes.numbered(first.session, first.shard))
                with link.quick.use() as connection, open_stream("Report", connection.stub.Report()) as call:

                    async def pass_on() -> None:
                        with tolerate_ended_call():
                            await call.write(first)
                            async for told in requests:
                                if told.HasField("session"):
                                    self._may(context, told.session.learner)
                                await call.write(told)
                            await call.done_writing()

                    async with _beside(call, pass_on()), wait():
                        reply: pb.ReportReply = await call
                return reply
            finally:
                await discard_rest(requests)

    async def LeaseUnits(self, request: pb.LeaseUnitsRequest, context: Context) -> pb.LeaseUnitsReply:
        """Passes a learner's request for data units on to the core."""
        shard = self._routes.near(request.session)
        async with self._answering(context, shard, request.session):
            self._may(context, request.session.learner)
            with shard.link.quick.use() as connection:
                reply: pb.LeaseUnitsReply = await unary_reply(connection.stub.LeaseUnits(request, timeout=QUICK_S))
            return reply

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """Tells a shard that a learner is leaving."""
        shard = self._routes.numbered(request.session, request.last.shard)
        async with self._answering(context, shard, request.session):
            self._may(context, request.session.learner)
            with shard.link.quick.use() as connection:
                reply: pb.LeaveReply = await unary_reply(connection.stub.Leave(request, timeout=QUICK_S))
            shard.sessions.refused(request.session)
            return reply

    # ------------------------------------------------------------------------------ contributions

    async def Push(self, requests: AsyncIterator[Pushed], context: Context) -> AsyncIterator[pb.PushReply]:
        """Checks a contribution's frames and passes them on to the core.

        The core's replies state which frames have arrived.
        """
        wait = self._waits.begin()
        async with self._answering(context) as route:
            try:
                request = await wait.first(requests, "a Push stream")
                if not isinstance(request, pb.PushRequest) or request.frames:
                    raise Refused(
                        Status.INVALID_ARGUMENT, "the first message of a Push stream must be a header without frames"
                    )
                header = request.header
                self._may(context, header.session.learner)
                name = contribution_name(header.session, header.fragment, header.seq)
                log.debug("forwarding a contribution", contribution=name, cycle=header.cycle)
                link = route.to(self._routes.owner(header.session, header.fragment))
                pool = link.quick if header.control_only else link.carriers
                with (
                    pool.use() as connection,
                    open_stream("Push", connection.stub.Push()) as call,
                    link.transfers.of(call) as moved,
                ):
                    with tolerate_ended_call():
                        await call.write(request)
                    async with _beside(call, self._frames(call, requests, header)):
                        while (reply := await wait.next(aiter(call))) is not None:
                            moved()
                            if reply.HasField("receipt"):
                                log.debug("the core sent a receipt", contribution=name)
                            yield reply
            finally:
                await discard_rest(requests)

    async def _frames(self, call: Any, requests: AsyncIterator[Pushed], header: pb.PushHeader) -> None:  # noqa: ANN401
        """Sends a contribution's frames as fast as the core accepts them. Raises Refused for invalid frames."""
        up = self._metrics.learner(header.session.learner, "up")
        with tolerate_ended_call():
            async for request in requests:
                size = _checked(request, header)
                self._metrics.up.inc(size)
                up.inc(size)
                await call.write(request)
            await call.done_writing()

    # ------------------------------------------------------------------------------ updates

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[Sent]:
        """Answers a Fetch from the front's cache or with the core's replies."""
        owner = self._routes.owner(request.session, request.fragment)
        async with self._answering(context, owner, request.session):
            self._may(context, request.session.learner)
            async with aclosing(self.fetching.fetch(request)) as replies:
                async for reply in replies:
                    yield reply

    # ------------------------------------------------------------------------------ checks and errors

    def _may(self, context: Context, learner: str) -> Caller:
        """Returns the caller. Raises Refused unless it may use this learner's name. The core relies on this check."""
        who = caller(context)
        if who.role not in {None, Role.LEARNER}:
            assert who.role is not None
            mine = f'{who.role.value} "{brief(who.name)}"'
            fix = "use a learner's certificate (atoll certs issue learner NAME)"
            text = f"a front serves learners, but this certificate is for {mine}: {fix}"
            raise Refused(Status.PERMISSION_DENIED, text)
        who.speaks_for(learner)
        return who


@asynccontextmanager
async def _beside(call: Any, sending: Coroutine[Any, Any, None]) -> AsyncIterator[None]:  # noqa: ANN401 - gRPC's
    """Context manager that runs `sending` while the body awaits the call's replies.

    If `sending` fails, the call is cancelled, and the context manager raises the error of `sending`. When the body
    ends, `sending` is cancelled.
    """
    task = asyncio.create_task(sending)
    task.add_done_callback(lambda ended: ended.cancelled() or (ended.exception() and call.cancel()))
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error from None  # `sending` failed first, and its failure cancelled the call
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _checked(request: Pushed, header: pb.PushHeader) -> int:
    """Checks a message's frames and returns the size of their payloads in bytes.

    Raises Refused for frames that are invalid or that the stream's header does not declare.
    """
    brought = frame_messages.frames_in(request)
    if header.control_only:
        raise Refused(
            Status.INVALID_ARGUMENT,
            "frames arrived over a stream that was declared control_only: send them over another stream",
        )
    if not 0 < len(brought) <= frame_messages.FRAMES_PER_MESSAGE:
        text = f"a Push message has {len(brought)} frames: send 1 to {frame_messages.FRAMES_PER_MESSAGE} per message"
        raise Refused(Status.INVALID_ARGUMENT, text)
    for frame in brought:
        if frame.index >= header.frames or len(frame.payload) > header.size_bytes:
            raise Refused(
                Status.INVALID_ARGUMENT,
                f"frame {frame.index} does not fit the header, which declares {header.frames} frames and "
                f"{header.size_bytes} bytes: use the same version of Atoll on both sides",
            )
        if crc32c(frame.payload) != frame.crc32c:
            raise Refused(Status.DATA_LOSS, f"frame {frame.index} does not match its checksum: send it again")
    return sum(len(frame.payload) for frame in brought)


def _versions(notification: pb.Notification) -> Iterable[tuple[int, int]]:
    """Returns the pairs of fragment and version in a notification."""
    if notification.HasField("current"):
        return notification.current.versions.items()
    published = notification.published
    return [(published.fragment, published.version)] if notification.HasField("published") else []
