"""The gRPC service for readers, which follow the published model. The service changes nothing in the run.

Readers do not join the run. They have no sessions or accounts and do not contribute to rounds. Their calls use separate
slots, so that they cannot use up the slots of learners.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, ExitStack, aclosing

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.contract import PROTOCOL
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import Sent
from atoll_wire.model_file.fixed_values import FixedFrames
from atoll_wire.security.certificate import Role

from atoll_server.access.identity import Caller, caller
from atoll_server.access.refusals import Refused, Status
from atoll_server.access.tokens import OperatorTokens, reader_name
from atoll_server.processes.core import Core
from atoll_server.processes.core_process import CoreProcess
from atoll_server.rpc.calls import Context, InterruptibleWaits, abort, wanted_frames
from atoll_server.rpc.reader_slots import ReaderSlots
from atoll_server.rpc.version_board import VersionBoard
from atoll_server.service import fragment_replies
from atoll_server.shard.fragment import Fragment
from atoll_server.shard.shard import Shard
from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Entry

ENCODED_AT_ONCE = 2  # frames of whole fragments and fixed values that are prepared for readers at the same time


class ReaderService(rpc.ReaderServicer):
    """A core's Reader service. A process with only a shard serves neither Describe nor the fixed values."""

    def __init__(self, core: CoreProcess, tokens: OperatorTokens | None) -> None:
        """tokens: the tokens with which operators may read; None if the core accepts no tokens."""
        self._core = core
        self._run = core.run
        self._tokens = tokens
        limits = core.settings.limits
        max_wait_s = core.settings.quotas.max_wait_s
        self._slots = ReaderSlots(limits.readers, limits.reads, max_wait_s, core.metrics.limited)
        self._encoding = asyncio.Semaphore(ENCODED_AT_ONCE)
        self._waits = InterruptibleWaits()
        self._board = VersionBoard()
        self._newest: dict[int, pb.PublishedVersion] = {}
        self._showing = asyncio.Lock()
        self._fixed: FixedFrames | None = None
        core.metrics.readers.set_function(lambda: self._board.watching)
        core.journal.subscribe(self._on, only_shows=True)

    def stop(self) -> None:
        """Ends all watches."""
        self._waits.end("the core is stopping: watch this or another address again")

    # ------------------------------------------------------------------------------ calls

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:
        """Describes the run."""
        try:
            self._reader(context)
            if request.protocol != PROTOCOL:
                text = f"the reader uses protocol {request.protocol}, but this core uses {PROTOCOL}"
                raise Refused(Status.FAILED_PRECONDITION, f"{text}: use the same version of Atoll on both sides")
            core = self._core
            if not isinstance(core, Core):
                text = f"this is shard {self._run.number} of the run: give the reader the address of the registrar"
                raise Refused(Status.FAILED_PRECONDITION, f"{text} ({core.settings.registrar}) or of a front")
            shard = core.run.running()
            return pb.DescribeReply(
                run=core.run.run_id,
                generation=core.run.generation,
                settings=core.run.settings_message(),
                fingerprint=shard.layout.fingerprint,
                shards=core.run.places(),
                fixed_bytes=self._fixed_frames(shard).size_bytes,
                fixed_frames=self._fixed_frames(shard).count,
            )
        except Refused as refused:
            await abort(context, refused)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchReply]:
        """Sends the newest versions of this process's fragments until the reader or this core ends the call."""
        wait = self._waits.begin()
        try:
            who = self._reader(context)
            shard = self._shard_of(request.run, request.generation)
            with ExitStack() as slot:
                if who.role is not Role.FRONT:
                    slot.enter_context(self._slots.watching())
                async with wait():
                    await self._show(shard)
                async with aclosing(self._board.watch()) as replies:
                    while (reply := await wait.next(replies)) is not None:
                        yield reply
        except Refused as refused:
            await abort(context, refused)

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[Sent]:
        """Sends a published update, a whole fragment at its current version or the fixed values."""
        try:
            who = self._reader(context)
            shard = self._shard_of(request.run, request.generation)
            async with AsyncExitStack() as slot:
                if who.role is not Role.FRONT:
                    await slot.enter_async_context(self._slots.reading())
                if request.fixed:
                    replies = self._fixed_values(shard, request)
                else:
                    fragment = self._run.owner(request.fragment)[1]
                    # Fronts pass receipts on to learners. Without TLS, any caller may be a front.
                    receipts = who.role in {None, Role.FRONT}
                    read = self._whole if request.whole else self._update
                    replies = read(shard, fragment, request, receipts=receipts)
                async with aclosing(replies):
                    async for reply in replies:
                        yield reply
        except Refused as refused:
            await abort(context, refused)

    # ------------------------------------------------------------------------------ replies

    async def _update(
        self, shard: Shard, fragment: Fragment, request: pb.ReadRequest, *, receipts: bool
    ) -> AsyncGenerator[Sent, None]:
        wanted = wanted_frames(request, len(fragment.place.frames))
        publication = await fragment_replies.published(shard, fragment, request)
        yield fragment_replies.update_header(shard, fragment, publication, publication.receipts if receipts else ())
        sent = self._core.metrics.sent_to_readers("update")
        async with aclosing(fragment_replies.update_frames(fragment, publication, wanted, sent)) as replies:
            async for reply in replies:
                yield reply

    async def _whole(
        self, shard: Shard, fragment: Fragment, request: pb.ReadRequest, *, receipts: bool
    ) -> AsyncGenerator[Sent, None]:
        del receipts  # a whole fragment's receipt is for the learner that fetches it
        wanted = wanted_frames(request, len(fragment.place.frames))
        async with shard.readers.newest_for_readers(fragment) as state:
            yield await fragment_replies.whole_header(fragment, state, ())
            sent = self._core.metrics.sent_to_readers("whole")
            compressed = self._run.settings.compression.applies(fast=request.fast)
            frames = fragment_replies.whole_frames(fragment, state, wanted, sent, self._encoding, compressed=compressed)
            async with aclosing(frames) as replies:
                async for reply in replies:
                    yield reply

    async def _fixed_values(self, shard: Shard, request: pb.ReadRequest) -> AsyncGenerator[Sent, None]:
        if not isinstance(self._core, Core):
            raise Refused(Status.INVALID_ARGUMENT, "only the registrar has the fixed values: read them there")
        fixed = self._fixed_frames(shard)
        wanted = wanted_frames(request, fixed.count)
        header = pb.FetchHeader(codec=pb.CODEC_UNSPECIFIED, frames=fixed.count, size_bytes=fixed.size_bytes)
        yield pb.FetchReply(header=header)
        sent = self._core.metrics.sent_to_readers("fixed")
        for index in wanted:
            async with self._encoding:
                payload = await asyncio.to_thread(fixed.frame, index)
                shard.initial.forget()
            sent(len(payload), 0)
            yield frame_messages.encode(index, crc32c(payload), payload)

    def _fixed_frames(self, shard: Shard) -> FixedFrames:
        if self._fixed is None:
            self._fixed = FixedFrames(shard.layout, shard.initial)
        return self._fixed

    # ------------------------------------------------------------------------------ versions

    def _on(self, entry: Entry, _now: float) -> None:
        """Shows a published version to the readers."""
        if isinstance(entry, entries.Published) and (shard := self._run.shard) is not None:
            merge = entry.merge
            publication = shard.cache.get(merge.fragment, merge.version)
            assert publication is not None, "an update is cached before it is published"
            self._keep(shard.fragments[merge.fragment], merge.version, publication.crc32c)
            if self._board.shows(self._run.number):
                newest = [self._newest[merge.fragment]]
                self._board.show(self._run.number, shard.follower_log.number, newest)

    def _keep(self, fragment: Fragment, version: int, checksum: int) -> None:
        known = self._newest.get(fragment.index)
        if known is None or known.version < version:
            self._newest[fragment.index] = pb.PublishedVersion(
                fragment=fragment.index, version=version, crc32c=checksum, frames=len(fragment.place.frames)
            )

    async def _show(self, shard: Shard) -> None:
        """Computes the checksums of fragments without a new version since this process started. Shows all versions."""
        async with self._showing:
            for fragment in shard.fragments.values():
                if fragment.index not in self._newest:
                    async with shard.readers.newest_for_readers(fragment) as state:
                        checksum = await asyncio.to_thread(frame_codec.vector_crc32c, state.theta_pub)
                        self._keep(fragment, state.version, checksum)
            if not self._board.shows(self._run.number):
                self._board.show(self._run.number, shard.follower_log.number, self._newest.values())

    # ------------------------------------------------------------------------------ checks

    def _reader(self, context: Context) -> Caller:
        """Returns the caller. Raises Refused unless the caller may read."""
        try:
            who = caller(context)
            reader_name(self._tokens, who, context.invocation_metadata() or ())
        except Refused as refused:
            self._run.record(entries.SessionRefused("", context.peer(), refused))
            raise
        return who

    def _shard_of(self, run: str, generation: int) -> Shard:
        """Returns this process's shard. Raises Refused for another run or generation."""
        shard = self._run.running()
        if (run, generation) != (self._run.run_id, self._run.generation):
            text = "the run has another generation, or this is another run: call Describe again"
            raise Refused(Status.UNAUTHENTICATED, text)
        return shard
