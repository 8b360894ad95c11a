"""gRPC <-> core, for learners. Each method converts, asks, and answers; nothing is decided here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import structlog
from atoll_wire import codec, frames
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.codec import Codec
from atoll_wire.frames import Pushed, Sent
from atoll_wire.layout import MergeKind, TensorSpec

from atoll_server.attendance import leave, progress
from atoll_server.calls import Context, abort, first, let_go
from atoll_server.core import Core
from atoll_server.engine import Engine
from atoll_server.joining import Joining
from atoll_server.refusal import Refused, Status
from atoll_server.roster import Entry
from atoll_server.spool import Upload

log = structlog.get_logger()

KINDS = {pb.MERGE_KIND_AVERAGE: MergeKind.AVERAGE, pb.MERGE_KIND_DIRECTION: MergeKind.DIRECTION}
MOST_DIMENSIONS = 8
HEADER_BYTES = 4096  # of a Push, which is kept as long as its upload grows
MOST_PATIENCE = 4.0  # with one stream of many, times the patience with an upload
HEARD_S = 0.05  # between two messages that tell what came over a stream: how quick a link is shows in them


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
            await abort(context, refused)

    async def Initialise(self, requests: AsyncIterator[pb.InitialiseRequest], context: Context) -> pb.InitialiseReply:
        """Takes the first parameters from the learner that holds the lease."""
        staging, accepting = None, None
        try:
            header = (await first(requests, "an Initialise stream")).header
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
            await abort(context, refused)
        except OSError as error:
            text = f"the first parameters cannot be written ({error.strerror}): make room on the core's disk"
            log.error("first parameters refused", detail=text)
            await abort(context, Refused(Status.RESOURCE_EXHAUSTED, text))
        finally:
            if accepting is not None:
                await asyncio.wait({accepting, self._core.failed}, return_when=asyncio.FIRST_COMPLETED)
            if staging is not None:
                await asyncio.to_thread(staging.close)
            await let_go(requests)

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.Happening]:
        """Tells what happens until the learner or this core goes."""
        try:
            entry = self._core.session(request.session)
            self._engine()
        except Refused as refused:
            await abort(context, refused)
        entry.streams += 1
        incarnation = entry.incarnation
        try:
            async for happening in self._core.happenings.follow(entry.name, request.log, request.sequence):
                self._core.roster.still(entry, incarnation)
                yield happening
        except Refused as refused:
            await abort(context, refused)
        finally:
            entry.streams -= 1

    async def Push(self, requests: AsyncIterator[Pushed], context: Context) -> AsyncIterator[pb.PushReply]:
        """Takes one contribution, or what is missing of it."""
        header = pb.PushHeader()
        try:
            request = await first(requests, "a Push stream")
            if isinstance(request, pb.PushRequest):
                if request.ByteSize() > HEADER_BYTES:
                    raise Refused(Status.INVALID_ARGUMENT, "a Push stream begins with a header, and nothing beside it")
                header = request.header
            entry, engine = self._core.session(header.session), self._engine()
            self._fragment(engine, header.fragment)
            version, cycle = engine.states[header.fragment].version, engine.syncer.fragments[header.fragment].cycle
            answer = engine.uploads.offer(header, version, cycle, engine.run.max_staleness, time.monotonic())
            if isinstance(answer, Upload):
                yield pb.PushReply(have=pb.Have(frames=sorted(answer.have)))
                # Each holds a message in memory: the others' senders wait.
                async with self._slots, aclosing(self._frames(requests, answer, entry, header)) as told:
                    async for have in told:
                        yield pb.PushReply(have=pb.Have(frames=have))
                if not answer.whole():  # other streams of this contribution bring the rest
                    await engine.uploads.ended(answer)
                answer = await engine.uploads.complete(answer)
            yield pb.PushReply(receipt=answer)
        except Refused as refused:
            self._core.turned_away(refused, header.session.learner)
            await abort(context, refused)
        finally:
            await let_go(requests)

    async def _frames(
        self, requests: AsyncIterator[Pushed], upload: Upload, entry: Entry, header: pb.PushHeader
    ) -> AsyncGenerator[list[int], None]:
        """Takes what a stream brings, until the upload is whole; tells what has come."""
        uploads, syncer = self._engine().uploads, self._engine().syncer
        came, told_at = list[int](), time.monotonic()
        while not upload.whole() and (request := await self._next(requests, upload)) is not None:
            self._core.roster.still(entry, header.session.incarnation)
            brought, now = frames.frames_in(request), time.monotonic()
            if not 0 < len(brought) <= frames.TOGETHER:
                text = f"{len(brought)} frames in one message: 1 to {frames.TOGETHER} are taken"
                raise Refused(Status.INVALID_ARGUMENT, text)
            if await uploads.take(upload, brought, now):
                syncer.uploading(entry.name, header.fragment, now)
            came.extend(frame.index for frame in brought)
            if now > told_at + HEARD_S:
                yield came
                came, told_at = [], now
        if came:
            yield came

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
            await abort(context, refused)

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
        spans = engine.layout.fragments[request.fragment].frames[request.stripe :: request.stripes or 1]
        together = frames.TOGETHER if request.stripes <= 1 else 1  # who has many connections has none to spare for this
        for start in range(0, len(spans), together):
            some = spans[start : start + together]
            yield b"".join(publication.messages[span.index] for span in some)
            for span in some:
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
            await abort(context, refused)
        finally:
            if entry is not None:
                entry.streams -= 1
            await let_go(requests)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """Says good-bye to a learner."""
        try:
            entry, last = self._core.session(request.session), request.last if request.HasField("last") else None
            await asyncio.shield(asyncio.create_task(leave(self._core, entry, last)))
            return pb.LeaveReply()
        except Refused as refused:
            await abort(context, refused)

    # ------------------------------------------------------------------------------ checks

    async def _next(self, requests: AsyncIterator[Pushed], upload: Upload) -> Pushed | None:
        """The stream's next message, unless it takes longer than this upload's frames make likely."""
        usual_s = upload.arrivals.patience_s() * (upload.streams + 1)  # gaps are learnt over all streams together
        patience_s = min(usual_s, MOST_PATIENCE * self._core.settings.limits.upload_idle_s)
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
