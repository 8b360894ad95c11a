"""gRPC <-> core, for learners. Each method converts, asks, and answers; nothing is decided here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
import structlog
from atoll_wire import codec, frames
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.codec import Codec
from atoll_wire.frames import Pushed, Sent, WireFrame
from atoll_wire.layout import FRAME_PARAMETERS, MergeKind, TensorSpec

from atoll_server.attendance import leave, progress
from atoll_server.core import Core
from atoll_server.engine import Engine
from atoll_server.joining import Joining
from atoll_server.refusal import Refused, Status
from atoll_server.roster import Entry
from atoll_server.spool import Upload

log = structlog.get_logger()

KINDS = {pb.MERGE_KIND_AVERAGE: MergeKind.AVERAGE, pb.MERGE_KIND_DIRECTION: MergeKind.DIRECTION}
MOST_DIMENSIONS = 8
WINDOW_BYTES = 2 << 20  # on its way to a stream: 25 MB/s at 80 ms; who needs more has more connections

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class OuterService(rpc.OuterServicer):
    """What learners call."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._joining = Joining(core)
        self._slots = asyncio.Semaphore(core.settings.limits.pushes)

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        """Makes a learner known, or known again."""
        try:
            return await self._joining.join(request, self._tensors(request))
        except Refused as refused:
            log.warning("join refused", learner=request.learner[:80], detail=refused.detail)
            await _abort(context, refused)

    async def Initialise(self, requests: AsyncIterator[pb.InitialiseRequest], context: Context) -> pb.InitialiseReply:
        """Takes the first parameters from the learner that holds the lease."""
        staging, accepting = None, None
        try:
            header = (await _first(requests, "an Initialise stream")).header
            entry = self._core.session(header.session)
            staging = await self._joining.stage(entry, header)
            async for request in requests:
                await asyncio.to_thread(staging.take, request.chunk)
                self._joining.renew_lease(entry)
            accepting = self._core.underway(self._joining.accept(entry, staging))
            await asyncio.shield(accepting)  # once it has begun, the learner's going away does not stop it half-way
            return pb.InitialiseReply()
        except Refused as refused:
            log.warning("first parameters refused", detail=refused.detail)
            await _abort(context, refused)
        except OSError as error:
            text = f"the first parameters cannot be written ({error.strerror}): make room on the core's disk"
            log.error("first parameters refused", detail=text)
            await _abort(context, Refused(Status.RESOURCE_EXHAUSTED, text))
        finally:
            if accepting is not None:
                await asyncio.wait({accepting, self._core.failed}, return_when=asyncio.FIRST_COMPLETED)
            if staging is not None:
                await asyncio.to_thread(staging.close)
            await _let_go(requests)

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.Happening]:
        """Tells what happens until the learner or this core goes."""
        try:
            entry = self._core.session(request.session)
            self._engine()
        except Refused as refused:
            await _abort(context, refused)
        entry.streams += 1
        incarnation = entry.incarnation
        try:
            async for happening in self._core.happenings.follow(entry.name, request.log, request.sequence):
                self._core.roster.still(entry, incarnation)
                yield happening
        except Refused as refused:
            await _abort(context, refused)
        finally:
            entry.streams -= 1

    async def Push(self, requests: AsyncIterator[Pushed], context: Context) -> AsyncIterator[pb.PushReply]:
        """Takes one contribution, or what is missing of it."""
        header = pb.PushHeader()
        try:
            first = await _first(requests, "a Push stream")
            header = first.header if isinstance(first, pb.PushRequest) else header
            entry, engine = self._core.session(header.session), self._engine()
            self._fragment(engine, header.fragment)
            version, cycle = engine.states[header.fragment].version, engine.syncer.fragments[header.fragment].cycle
            answer = engine.uploads.offer(header, version, cycle, engine.run.max_staleness, time.monotonic())
            if isinstance(answer, Upload):
                async with self._slots:  # each holds a frame in memory: the others' senders wait
                    yield pb.PushReply(have=pb.Have(frames=sorted(answer.have)))
                    last = False
                    while not answer.whole() and not last:
                        request = await self._next(requests, answer)
                        last = request is None
                        if request is not None:
                            self._core.roster.still(entry, header.session.incarnation)
                            frame = request if isinstance(request, WireFrame) else request.frame
                            if await engine.uploads.take(answer, frame, time.monotonic()):
                                engine.syncer.uploading(entry.name, header.fragment, time.monotonic())
                if last:  # other streams of this contribution bring the rest
                    await engine.uploads.ended(answer)
                answer = await engine.uploads.complete(answer)
            yield pb.PushReply(receipt=answer)
        except Refused as refused:
            self._core.turned_away(refused, header.session.learner)
            await _abort(context, refused)
        finally:
            await _let_go(requests)

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[Sent]:
        """Sends a published update, or a whole fragment at its current version."""
        try:
            entry, engine = self._core.session(request.session), self._engine()
            self._fragment(engine, request.fragment)
            replies = self._whole if request.whole else self._update
            async with aclosing(replies(engine, entry, request)) as them:
                async for reply in them:
                    yield reply
        except Refused as refused:
            await _abort(context, refused)

    async def _update(self, engine: Engine, entry: Entry, request: pb.FetchRequest) -> AsyncGenerator[Sent, None]:
        publication = engine.cache.get(request.fragment, request.version)
        if publication is None:
            raise Refused(
                Status.NOT_FOUND,
                f"update {request.version} of fragment {request.fragment} is not kept: fetch the fragment whole",
            )
        yield pb.FetchReply(
            header=pb.FetchHeader(
                fragment=request.fragment, version=publication.version,
                codec=int(engine.run.codec),  # type: ignore[arg-type]
                frames=len(publication.messages), size_bytes=publication.size_bytes, crc32c=publication.crc32c,
                receipts=publication.receipts,
            )
        )  # fmt: skip
        spans = engine.layout.fragments[request.fragment].frames
        for span in spans[request.stripe :: request.stripes or 1]:
            yield publication.messages[span.index]
            engine.sent(entry, publication.sizes[span.index], span.length, whole=False)

    async def _whole(self, engine: Engine, entry: Entry, request: pb.FetchRequest) -> AsyncGenerator[Sent, None]:
        fragment = engine.layout.fragments[request.fragment]
        async with engine.readers.newest(fragment.index) as state:
            newest = engine.uploads.newest_receipt(entry.name, entry.incarnation, fragment.index)  # of this moment too
            crc = await asyncio.to_thread(codec.vector_crc32c, state.theta_pub)
            yield pb.FetchReply(
                header=pb.FetchHeader(
                    fragment=fragment.index, version=state.version, codec=pb.CODEC_FLOAT32,
                    frames=len(fragment.frames), size_bytes=4 * fragment.length, crc32c=crc,
                    receipts=[newest] if newest is not None else [],
                )
            )  # fmt: skip
            for span in fragment.frames[request.stripe :: request.stripes or 1]:
                payload = await asyncio.to_thread(codec.encode_frame, state.theta_pub, span, Codec.FLOAT32)
                engine.sent(entry, len(payload), span.length, whole=True)
                yield frames.encode(span.index, codec.crc32c(payload), payload)

    async def Report(self, requests: AsyncIterator[pb.Progress], context: Context) -> pb.ReportReply:
        """Takes in how training goes."""
        entry: Entry | None = None
        try:
            async for told in requests:
                if entry is None:
                    entry = self._core.session(told.session)
                    entry.streams += 1
                    entry.reports.again(time.monotonic())
                    incarnation = entry.incarnation
                self._core.roster.still(entry, incarnation)
                if entry.token:
                    progress(self._core, entry, told)
            return pb.ReportReply()
        except Refused as refused:
            await _abort(context, refused)
        finally:
            if entry is not None:
                entry.streams -= 1
            await _let_go(requests)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """Says good-bye to a learner."""
        try:
            entry, last = self._core.session(request.session), request.last if request.HasField("last") else None
            await asyncio.shield(asyncio.create_task(leave(self._core, entry, last)))
            return pb.LeaveReply()
        except Refused as refused:
            await _abort(context, refused)

    # ------------------------------------------------------------------------------ checks

    async def _next(self, requests: AsyncIterator[Pushed], upload: Upload) -> Pushed | None:
        """The stream's next message, unless it takes longer than this upload's frames make likely."""
        patience_s = upload.arrivals.patience_s() * (upload.streams + 1)  # gaps are learnt over all streams together
        upload.streams += 1
        try:
            async with asyncio.timeout(patience_s):
                return await anext(requests, None)
        except TimeoutError as error:
            text = f"no frame of {upload.key} came for {patience_s:.1f} s: go on with it"
            raise Refused(Status.UNAVAILABLE, text) from error
        finally:
            upload.streams -= 1

    def _engine(self) -> Engine:
        if self._core.engine is None:
            raise Refused(Status.UNAVAILABLE, "the run has no parameters yet: join again in a moment")
        return self._core.engine

    def _fragment(self, engine: Engine, fragment: int) -> None:
        count = len(engine.layout.fragments)
        if fragment >= count:
            raise Refused(Status.INVALID_ARGUMENT, f"there is no fragment {fragment}: the run has 0 to {count - 1}")

    def _tensors(self, request: pb.JoinRequest) -> tuple[TensorSpec, ...]:
        limits = self._core.settings.limits
        if not 0 < len(request.tensors) <= limits.tensors:
            raise Refused(Status.INVALID_ARGUMENT, f"{len(request.tensors)} tensors: 1 to {limits.tensors} are taken")
        for tensor in request.tensors:
            names = (tensor.name, *tensor.tied_names)
            if (
                max(len(name.encode()) for name in names) > limits.tensor_name_bytes
                or len(tensor.shape) > MOST_DIMENSIONS
            ):
                raise Refused(
                    Status.INVALID_ARGUMENT, f'tensor "{tensor.name[:80]}" has too long a name or too many dimensions'
                )
            if tensor.kind not in KINDS:
                raise Refused(Status.INVALID_ARGUMENT, f'tensor "{tensor.name}" does not say how it is merged')
        parameters = sum(math.prod(tensor.shape) for tensor in request.tensors)
        if parameters > limits.parameters:
            raise Refused(
                Status.INVALID_ARGUMENT, f"{parameters} trainable parameters: at most {limits.parameters} are taken"
            )
        return tuple(
            TensorSpec(t.name, tuple(t.shape), t.dtype, KINDS[t.kind], tuple(t.tied_names)) for t in request.tensors
        )


def message_options(most_bytes: int) -> list[tuple[str, int]]:
    """Of the server's channel: limits on what it takes, and how it finds out that a peer is gone."""
    assert most_bytes > 8 * FRAME_PARAMETERS, "a frame must fit into a message"
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", most_bytes),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a lottery
        ("grpc.keepalive_time_ms", 30_000),  # for what nobody waits for: arrivals tell much earlier
        ("grpc.keepalive_timeout_ms", 20_000),  # a ping stands behind the frames of a slow link
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.http2.bdp_probe", 0),  # a window that grows with the link would be memory that grows with learners
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ]


async def _first(requests: AsyncIterator[object], what: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
    async for request in requests:
        return request
    raise Refused(Status.INVALID_ARGUMENT, f"{what} begins with a header: none came")


async def _let_go(requests: Any) -> None:  # noqa: ANN401 - an asynchronous generator, behind gRPC's iterator
    """Ends a stream that was not read to its end: gRPC's reader holds itself and its call, of a connection's few."""
    await aiter(requests).aclose()


async def _abort(context: Context, refused: Refused) -> NoReturn:
    try:
        await context.abort(grpc.StatusCode[refused.status.name], refused.detail)
    except Exception as error:
        asyncio.get_running_loop().call_soon(_forget, error)
        raise
    raise AssertionError("abort raises")


def _forget(error: Exception) -> None:
    """The call holds the error that it was aborted with: that must not hold the call."""
    error.__traceback__ = error.__context__ = None
