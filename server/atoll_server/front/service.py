"""gRPC <-> gRPC: learners below, the core above. What is decided about a run is decided there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import structlog
from atoll_wire import frames
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.calling import LinkLost, answer, opened, until_it_ends
from atoll_wire.certificate import Role
from atoll_wire.checksums import crc32c
from atoll_wire.contract import JOIN_S
from atoll_wire.frames import Pushed, Sent
from atoll_wire.links import said
from atoll_wire.logs import contribution

from atoll_server.access.audit_log import AuditLog
from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.front.fetching import Fetching
from atoll_server.front.metrics import FrontMetrics
from atoll_server.front.sessions import Sessions
from atoll_server.front.upstream import Upstream, lost
from atoll_server.rpc.calls import Context, Waits, end, let_go

log = structlog.get_logger()

QUICK_S = 20.0


class FrontService(rpc.OuterServicer):
    """What learners of a region call."""

    def __init__(self, upstream: Upstream, metrics: FrontMetrics, cache_bytes: int, audit_log: AuditLog) -> None:
        """cache_bytes: of updates and whole fragments."""
        self._upstream, self._metrics, self._audit_log = upstream, metrics, audit_log
        self._sessions = Sessions()
        self.fetching = Fetching(upstream, self._sessions, metrics, cache_bytes)
        self._waits, self._stopping = Waits(), False

    def stop(self) -> None:
        """Ends what would go on for long, and tells every follower that it has to go elsewhere."""
        self._stopping = True
        self._waits.end("this front is going away: reconnect, here or through another")

    # ------------------------------------------------------------------------------ passed on as they are

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        """The core lets in; the session that it gives is known here from now on."""
        async with self._answering(context):
            self._may(context, request.learner)
            began = self._upstream.clock.monotonic()
            with self._upstream.link.quick.use() as connection:
                reply: pb.JoinReply = await answer(connection.stub.Join(request, timeout=JOIN_S))
            self._upstream.link.answered(self._upstream.clock.monotonic() - began)
            session = pb.Session(
                run=reply.run, learner=request.learner, incarnation=reply.incarnation, generation=reply.generation,
                token=reply.token,
            )  # fmt: skip
            if reply.state != pb.JoinReply.STATE_CONFIRM:
                self.fetching.told(reply.log, session, reply.versions.items())
                log.info("joined", learner=request.learner, incarnation=reply.incarnation, region=request.region)
            return reply

    async def Initialise(self, requests: AsyncIterator[pb.InitialiseRequest], context: Context) -> pb.InitialiseReply:
        """The first parameters go through."""
        wait = self._waits.begin()
        async with self._answering(context):
            try:
                header = await wait.first(requests, "an Initialise stream")
                self._may(context, header.header.session.learner)
                with (
                    self._upstream.link.carriers.use() as connection,
                    opened("Initialise", connection.stub.Initialise()) as call,
                    self._upstream.link.transfers.of(call) as moved,
                ):

                    async def pass_on() -> None:
                        with until_it_ends():
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
                await let_go(requests)

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.Happening]:
        """What the core tells, until it, the learner or this front goes."""
        async with self._answering(context, request.session):
            self._may(context, request.session.learner)
            wait = self._waits.begin()
            with (
                self._upstream.link.quick.use() as connection,
                opened("Follow", connection.stub.Follow(request)) as call,
            ):
                try:
                    while (happening := await wait.next(aiter(call))) is not None:
                        self.fetching.told(happening.log, request.session, _versions(happening))
                        self._metrics.core_up.set(1)
                        yield happening
                except Refused:
                    if not self._stopping:
                        raise
                    yield pb.Happening(shutting_down=pb.ShuttingDown())

    async def Report(self, requests: AsyncIterator[pb.Progress], context: Context) -> pb.ReportReply:
        """How training goes, for the core to count."""
        async with self._answering(context):
            try:
                with self._upstream.link.quick.use() as connection, opened("Report", connection.stub.Report()) as call:

                    async def pass_on() -> None:
                        with until_it_ends():
                            async for told in requests:
                                if told.HasField("session"):
                                    self._may(context, told.session.learner)
                                await call.write(told)
                            await call.done_writing()

                    async with _beside(call, pass_on()), self._waits.begin()():
                        reply: pb.ReportReply = await call
                return reply
            finally:
                await let_go(requests)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """A good-bye."""
        async with self._answering(context, request.session):
            self._may(context, request.session.learner)
            with self._upstream.link.quick.use() as connection:
                reply: pb.LeaveReply = await answer(connection.stub.Leave(request, timeout=QUICK_S))
            self._sessions.refused(request.session)
            return reply

    # ------------------------------------------------------------------------------ contributions

    async def Push(self, requests: AsyncIterator[Pushed], context: Context) -> AsyncIterator[pb.PushReply]:
        """Passes frames on that are what they say; what the core has is the core's to say."""
        wait = self._waits.begin()
        async with self._answering(context):
            try:
                request = await wait.first(requests, "a Push stream")
                if not isinstance(request, pb.PushRequest) or request.frames:
                    raise Refused(Status.INVALID_ARGUMENT, "a Push stream begins with a header, and nothing beside it")
                header = request.header
                self._may(context, header.session.learner)
                name = contribution(header.session, header.fragment, header.seq)
                log.debug("passing on", contribution=name, cycle=header.cycle)
                link = self._upstream.link
                pool = link.quick if header.asks_only else link.carriers
                with (
                    pool.use() as connection,
                    opened("Push", connection.stub.Push()) as call,
                    self._upstream.link.transfers.of(call) as moved,
                ):
                    with until_it_ends():
                        await call.write(request)
                    async with _beside(call, self._frames(call, requests, header)):
                        while (reply := await wait.next(aiter(call))) is not None:
                            moved()
                            if reply.HasField("receipt"):
                                log.debug("answered by the core", contribution=name)
                            yield reply
            finally:
                await let_go(requests)

    async def _frames(self, call: Any, requests: AsyncIterator[Pushed], header: pb.PushHeader) -> None:  # noqa: ANN401
        """Upwards, as long as the core takes them. Raises Refused for what is not what it says."""
        up = self._metrics.learner(header.session.learner, "up")
        with until_it_ends():
            async for request in requests:
                size = _checked(request, header)
                self._metrics.up.inc(size)
                up.inc(size)
                await call.write(request)
            await call.done_writing()

    # ------------------------------------------------------------------------------ updates

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[Sent]:
        """From this front's memory, or through it."""
        async with self._answering(context, request.session):
            self._may(context, request.session.learner)
            async with aclosing(self.fetching.fetch(request)) as replies:
                async for reply in replies:
                    yield reply

    # ------------------------------------------------------------------------------ ends

    def _may(self, context: Context, learner: str) -> None:
        """Raises Refused for a name that is not the caller's: above it counts that this front says so."""
        who = caller(context)
        if who.role not in {None, Role.LEARNER}:
            assert who.role is not None
            mine = f'{who.role.value} "{who.name}"'
            text = f"a front serves learners, and this is the certificate of {mine}: see atoll certs issue learner"
            raise Refused(Status.PERMISSION_DENIED, text)
        who.speaks_for(learner)

    @asynccontextmanager
    async def _answering(self, context: Context, session: pb.Session | None = None) -> AsyncIterator[None]:
        """Ends a call as the core ended it, or with what was refused here."""
        link = self._upstream.link
        try:
            yield
        except Refused as refused:
            code, details = grpc.StatusCode[refused.status.name], refused.detail
            if refused.status is not Status.UNAVAILABLE:  # that is no judgement on who called
                self._audit_log.refused("refused", context.peer(), status=refused.status.value, detail=details)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
            if lost(error):
                self._metrics.core_up.set(0)
                self._upstream.suspect(link)
            if not said(error):  # by gRPC, or by a stranger on the core's port: it ends no learner
                code, details = grpc.StatusCode.UNAVAILABLE, f"from the core at {self._upstream.address}: {details}"
            if session is not None:
                self._sessions.refused(session)
        except LinkLost:
            code, details = grpc.StatusCode.UNAVAILABLE, f"the core at {self._upstream.address} is silent: try again"
        else:
            return
        self._metrics.refused.labels(code.name.lower()).inc()
        await end(context, code, details)


@asynccontextmanager
async def _beside(call: Any, sending: Coroutine[Any, Any, None]) -> AsyncIterator[None]:  # noqa: ANN401 - gRPC's
    """Sends while its answers are awaited: either may end the other, and what was wrong with it is what is raised."""
    task = asyncio.create_task(sending)
    task.add_done_callback(lambda ended: ended.cancelled() or (ended.exception() and call.cancel()))
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error from None  # it was what ended the call
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _checked(request: Pushed, header: pb.PushHeader) -> int:
    """Bytes of a message's payloads. Raises Refused for frames that are not what they say, or not of this header."""
    brought = frames.frames_in(request)
    if header.asks_only:
        raise Refused(Status.INVALID_ARGUMENT, "frames came over a stream that said that it brings none")
    if not 0 < len(brought) <= frames.TOGETHER:
        text = f"{len(brought)} frames in one message: 1 to {frames.TOGETHER} are taken"
        raise Refused(Status.INVALID_ARGUMENT, text)
    for frame in brought:
        if frame.index >= header.frames or len(frame.payload) > header.size_bytes:
            raise Refused(Status.INVALID_ARGUMENT, f"frame {frame.index} is none of the {header.frames} declared")
        if crc32c(frame.payload) != frame.crc32c:
            raise Refused(Status.DATA_LOSS, f"frame {frame.index} does not have its checksum: send it again")
    return sum(len(frame.payload) for frame in brought)


def _versions(happening: pb.Happening) -> Iterable[tuple[int, int]]:
    """Of fragments, that a happening tells."""
    if happening.HasField("current"):
        return happening.current.versions.items()
    published = happening.published
    return [(published.fragment, published.version)] if happening.HasField("published") else []
