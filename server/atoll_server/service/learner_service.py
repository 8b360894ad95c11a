"""The gRPC service for learners. The methods convert messages and call the core, which makes all decisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import Pushed, Sent
from atoll_wire.security.certificate import Role

from atoll_server.access.identity import caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_registry import LearnerProcess, RegistryEntry
from atoll_server.processes.core import Core
from atoll_server.processes.core_process import CoreProcess
from atoll_server.rpc.calls import (
    Context,
    InterruptibleWait,
    InterruptibleWaits,
    abort,
    discard_rest,
    wanted_frames,
)
from atoll_server.run.joining import Joining
from atoll_server.run.reports import progress
from atoll_server.service import fragment_replies
from atoll_server.shard.fragment import Fragment
from atoll_server.shard.intake import Intake
from atoll_server.shard.shard import Shard
from atoll_server.telemetry import entries
from atoll_server.uploads.upload_state import UploadState
from atoll_server.uploads.uploads import Upload

HEADER_BYTES = 4096  # limit on the size of a Push header, which stays in memory during the upload
MAX_PATIENCE = 4.0  # longest wait of a stream for its next message, as a multiple of the upload's idle timeout
HEARD_S = 0.05  # minimum time between acknowledgements of frames, with which learners measure the link's rate


class OuterService(rpc.OuterServicer):
    """A core's Outer service, which learners call. Learners join and send initial parameters only to the registrar."""

    def __init__(self, core: CoreProcess) -> None:
        self._core = core
        self._run = core.run
        self._joins = (
            Joining(core.run, core.settings, core.disk, core.begin, core.underway) if isinstance(core, Core) else None
        )
        self._waits = InterruptibleWaits()

    def stop(self) -> None:
        """Ends long calls but not writes that make work durable. Follow calls end when the follower log is closed."""
        self._waits.end("the core is stopping: reconnect to this or another address")

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        """Joins a learner to the run. The same learner may join repeatedly."""
        try:
            process = caller(context)
            process.speaks_for(request.learner)
            fleet = request.fleet if process.role is Role.FRONT else process.fleet
            return await self._joining().join(request, str(process), fleet)
        except Refused as refused:
            if isinstance(self._core, Core):
                self._core.run.refused_joins.add(request.learner, refused, self._core.clock.monotonic())
            self._run.record(entries.JoinRefused(request.learner, context.peer(), refused))
            await abort(context, refused)

    async def Initialise(self, requests: AsyncIterator[pb.InitialiseRequest], context: Context) -> pb.InitialiseReply:
        """Receives the initial parameters from the learner that holds the lease."""
        staging, accepting, wait = None, None, self._waits.begin()
        try:
            header = (await wait.first(requests, "an Initialise stream")).header
            process = self._session(context, header.session)
            joining = self._joining()
            staging = await joining.stage(process, header)
            lease_s = self._core.settings.limits.lease_s
            late = f"no bytes of the initial parameters arrived for {lease_s:.0f} s: join again"
            while (request := await wait.next(requests, lease_s, late)) is not None:
                self._core.metrics.moved(process.entry.region, "up", Codec.FLOAT32, len(request.chunk))
                await asyncio.to_thread(staging.take, request.chunk)
                joining.came(process, staging)
            accepting = self._core.underway(joining.accept(process, staging))
            await asyncio.shield(accepting)  # continues even if the learner disconnects
            return pb.InitialiseReply()
        except Refused as refused:
            self._run.record(entries.InitialParametersRefused(refused.detail))
            await abort(context, refused)
        except OSError as error:
            text = (
                f"the initial parameters cannot be written ({error.strerror}): check the core's disk and its free space"
            )
            self._run.record(entries.InitialParametersRefused(text, by_disk=True))
            await abort(context, Refused(Status.RESOURCE_EXHAUSTED, text))
        finally:
            if accepting is not None:
                await asyncio.wait({accepting, self._core.failed}, return_when=asyncio.FIRST_COMPLETED)
            if staging is not None:
                await asyncio.to_thread(staging.close)
            await discard_rest(requests)

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.Notification]:
        """Sends a shard's notifications until the learner or this core ends the call."""
        try:
            process = self._session(context, request.session)
            shard = self._run.numbered(request.shard)
            through = request.front if caller(context).role in {None, Role.FRONT} else 0
            self._run.links.follows(process.entry.name, through)
        except Refused as refused:
            await abort(context, refused)
        wait = InterruptibleWait()  # ended by the log's last notification, not by `stop`
        try:
            with process.entry.stream(wait.end):
                news = shard.follower_log.follow(process.entry.name, request.log, request.sequence)
                async with aclosing(news):
                    while (notification := await wait.next(news)) is not None:
                        yield notification
        except Refused as refused:
            await abort(context, refused)

    async def Push(self, requests: AsyncIterator[Pushed], context: Context) -> AsyncIterator[pb.PushReply]:
        """Receives a contribution or its missing frames and replies with the contribution's receipt."""
        header, wait = pb.PushHeader(), self._waits.begin()
        try:
            request = await wait.first(requests, "a Push stream")
            if isinstance(request, pb.PushRequest):
                if request.ByteSize() > HEADER_BYTES:
                    raise Refused(
                        Status.INVALID_ARGUMENT, "the first message of a Push stream must be a header without frames"
                    )
                header = request.header
            process = self._session(context, header.session)
            await self._run.fence(process)
            shard, _ = self._run.owner(header.fragment)
            intake = Intake(shard)
            answer = intake.offer(header, self._core.clock.monotonic())
            if isinstance(answer, Upload):
                received = sorted(answer.part.received)
                self._run.record(entries.UploadBegan(answer.key, header.cycle, len(received)))
                yield pb.PushReply(received=pb.ReceivedFrames(frames=received))
                async with aclosing(self._frames(requests, wait, answer, process, intake, header)) as told:
                    async for came in told:
                        yield pb.PushReply(received=pb.ReceivedFrames(frames=came))
                if answer.state is UploadState.GROWING:  # the contribution's other streams still send frames
                    async with wait():
                        await answer.ended.wait()
                answer = await intake.receipt(answer)
            yield pb.PushReply(receipt=answer)
        except Refused as refused:
            self._run.turn_away(refused, header.session.learner)
            await abort(context, refused)
        finally:
            await discard_rest(requests)

    async def _frames(
        self,
        requests: AsyncIterator[Pushed],
        wait: InterruptibleWait,
        upload: Upload,
        process: LearnerProcess,
        intake: Intake,
        header: pb.PushHeader,
    ) -> AsyncGenerator[list[int], None]:
        """Receives one stream's frames while the upload is growing. Yields lists of frame indices to acknowledge."""
        came, told_at = list[int](), self._core.clock.monotonic()
        while upload.state is UploadState.GROWING and (request := await self._next(requests, wait, upload)) is not None:
            process.check_current()
            brought, now = frame_messages.frames_in(request), self._core.clock.monotonic()
            size_bytes = sum(len(frame.payload) for frame in brought)  # counted even if the frames are refused
            self._core.metrics.moved(process.entry.region, "up", upload.part.codec, size_bytes)
            if header.control_only:
                raise Refused(
                    Status.INVALID_ARGUMENT,
                    "frames arrived over a stream that was declared control_only: send them over another stream",
                )
            if not 0 < len(brought) <= frame_messages.FRAMES_PER_MESSAGE:
                most = frame_messages.FRAMES_PER_MESSAGE
                text = f"a Push message has {len(brought)} frames: send 1 to {most} per message"
                raise Refused(Status.INVALID_ARGUMENT, text)
            await intake.take(upload, brought, now)
            came.extend(frame.index for frame in brought)
            if now > told_at + HEARD_S:
                yield came
                came, told_at = [], now
        if came:
            yield came

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[Sent]:
        """Sends a published update or a whole fragment at its current version."""
        try:
            process = self._session(context, request.session)
            shard, fragment = self._run.owner(request.fragment)
            replies = self._whole if request.whole else self._update
            async with aclosing(replies(shard, fragment, process.entry, request)) as them:
                async for reply in them:
                    process.check_current()
                    yield reply
        except Refused as refused:
            await abort(context, refused)

    async def _update(
        self, shard: Shard, fragment: Fragment, entry: RegistryEntry, request: pb.FetchRequest
    ) -> AsyncGenerator[Sent, None]:
        wanted = wanted_frames(request, len(fragment.place.frames))
        publication = await fragment_replies.published(shard, fragment, request)
        yield fragment_replies.update_header(shard, fragment, publication, publication.receipts)
        if request.header_only:
            return
        sent = partial(shard.sent, entry, whole=False)
        async with aclosing(fragment_replies.update_frames(fragment, publication, wanted, sent)) as replies:
            async for reply in replies:
                yield reply

    async def _whole(
        self, shard: Shard, fragment: Fragment, entry: RegistryEntry, request: pb.FetchRequest
    ) -> AsyncGenerator[Sent, None]:
        wanted = wanted_frames(request, len(fragment.place.frames))
        async with shard.readers.newest(fragment, None if request.header_only else entry.name) as state:
            # The receipt matches the state, since no other task has run since the state was read.
            newest = shard.uploads.newest_receipt(entry.name, entry.incarnation, fragment.index)
            yield await fragment_replies.whole_header(fragment, state, [newest] if newest is not None else [])
            if request.header_only:
                return
            sent = partial(shard.sent, entry, whole=True)
            compressed = self._run.settings.compression.applies(fast=request.fast)
            frames = fragment_replies.whole_frames(fragment, state, wanted, sent, None, compressed=compressed)
            async with aclosing(frames) as replies:
                async for reply in replies:
                    yield reply

    async def Report(self, requests: AsyncIterator[pb.Progress], context: Context) -> pb.ReportReply:
        """Receives a learner's progress reports."""
        wait = self._waits.begin()
        try:
            told: pb.Progress | None = await wait.first(requests, "a Report stream")
            assert told is not None, "`first` never returns None"
            entry = self._session(context, told.session).entry
            entry.reports.again(self._core.clock.monotonic())
            with entry.stream(wait.end):
                while told is not None:
                    progress(self._run, self._core.settings.limits.tokens, entry, told)
                    told = await wait.next(requests)
            return pb.ReportReply()
        except Refused as refused:
            await abort(context, refused)
        finally:
            await discard_rest(requests)

    async def LeaseUnits(self, request: pb.LeaseUnitsRequest, context: Context) -> pb.LeaseUnitsReply:
        """Leases units of a dataset to a learner."""
        try:
            process = self._session(context, request.session)
            if not isinstance(self._core, Core):
                raise self._elsewhere("lease data units")
            return await self._core.datasets.lease(process, request)
        except Refused as refused:
            await abort(context, refused)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """Receives a learner's announcement that it is leaving."""
        try:
            entry = self._session(context, request.session).entry
            last = request.last if request.HasField("last") else None
            if last is not None:
                progress(self._run, self._core.settings.limits.tokens, entry, last)
            await asyncio.shield(asyncio.create_task(self._run.left(entry, itself=True)))
            return pb.LeaveReply()
        except Refused as refused:
            await abort(context, refused)

    # ------------------------------------------------------------------------------ checks

    def _joining(self) -> Joining:
        """Returns the object that handles Joins. Raises Refused if this process is not the registrar's."""
        if self._joins is None:
            raise self._elsewhere("join")
        return self._joins

    def _elsewhere(self, what: str) -> Refused:
        """Returns the refusal for a call that only the registrar answers. what: description of the call, as text."""
        text = (
            f"this is shard {self._run.number} of the run, where learners cannot {what}: give the learner the "
            f"address of the registrar ({self._core.settings.registrar}) or of a front"
        )
        return Refused(Status.FAILED_PRECONDITION, text)

    def _session(self, context: Context, session: pb.Session) -> LearnerProcess:
        """Returns the learner process that made the call. Raises Refused if its certificate or session is not valid."""
        try:
            caller(context).speaks_for(session.learner)
            return self._run.session(session)
        except Refused as refused:
            self._run.record(entries.SessionRefused(session.learner, context.peer(), refused))
            raise

    async def _next(self, requests: AsyncIterator[Pushed], wait: InterruptibleWait, upload: Upload) -> Pushed | None:
        """Returns the stream's next message, or None at its end.

        Raises Refused if no message arrives for much longer than usual in this upload.
        """
        with upload.heard() as usual_s:
            max_wait_s = min(usual_s, MAX_PATIENCE * self._core.settings.limits.upload_idle_s)
            text = f"no frame of {upload.key} arrived for {max_wait_s:.1f} s: resume the upload"
            return await wait.next(requests, max_wait_s, text)
