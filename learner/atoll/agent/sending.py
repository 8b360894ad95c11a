"""Sends contributions. Each one is encoded once and is sent until the core acknowledges or refuses it.

The learner never replaces an upload whose fate is unknown. It offers the same bytes again under the same key. The core
answers with the list of frames that it has received, or with the receipt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import Payload, crc32c_of
from atoll_wire.codec.frame_codec import CodecError
from atoll_wire.connections.frame_transfer import upload
from atoll_wire.connections.link_speed import LinkSpeed
from atoll_wire.layout.frame_spans import Compression
from atoll_wire.layout.layout import FrameRun
from atoll_wire.messages.frame_messages import EncodedFrame
from atoll_wire.process.logs import contribution_name
from atoll_wire.process.tasks import end_all

from atoll.agent.coordination import Coordination
from atoll.agent.core_view import CoreView, FragmentTrack, InFlight, ShardView
from atoll.errors import LearnerError
from atoll.fragments.exchange import Submission, ThreadExchange
from atoll.stats import Counters
from atoll.transfers.call_errors import Remedy, detail, one_line
from atoll.transfers.retry_loop import Failure, retry

log = structlog.get_logger()


class Sender:
    """Sends at most one contribution of each fragment at a time."""

    def __init__(
        self,
        core: CoreView,
        exchange: ThreadExchange,
        counters: Counters,
        stop: Callable[[Exception], None],
        fetch: Callable[[FragmentTrack], None],
        coordination: Coordination,
    ) -> None:
        """stop: called with the error that ends the learner. fetch: called to bring a track up to date."""
        self._core = core
        self._exchange = exchange
        self._counters = counters
        self._stop = stop
        self._fetch = fetch
        self._coordination = coordination
        self._rng = random.Random()  # noqa: S311 - jitter
        self._tasks: list[asyncio.Task[None]] = []

    def send(self, track: FragmentTrack, taken: Submission) -> None:
        """Starts to send a pseudo-gradient, unless it has been submitted before. Returns immediately."""
        if taken.received:
            return
        taken.received = True
        seq = taken.outstanding.number
        if taken.outstanding.restores < track.restores or seq <= track.ended:
            self._left_behind(track, taken)
            return
        if not track.run.frames and self._coordination.owners.rank:
            self._exchange.settle(taken)
            return
        if track.in_flight is not None:  # the contribution has ended, but rank 0's message has not arrived yet
            self.end(track, merged=False)
        track.in_flight = InFlight(taken, seq)
        self._counters.pending += 1
        self._start(self._carry(track, track.in_flight))

    def _left_behind(self, track: FragmentTrack, taken: Submission) -> None:
        """Settles an obsolete pseudo-gradient, for example after a restore, without sending it."""
        log.info(
            "discarded obsolete work: the run was restored, or the contribution had ended", fragment=track.fragment
        )
        self._exchange.settle(taken)
        self._ended_together(track, taken.outstanding.number, drop=False)

    def ask_again(self, shard: ShardView) -> None:
        """Asks for the receipts of contributions that a shard acknowledged before an outage."""
        for track in shard.tracks.values():
            if track.in_flight is not None and track.in_flight.acknowledged and not track.in_flight.asking:
                track.in_flight.asking = True
                self._start(self._ask(track, track.in_flight))

    async def _ask(self, track: FragmentTrack, in_flight: InFlight) -> None:
        # Retries until the fate is known, because a missed refusal would keep the contribution in flight forever.
        try:
            await self._offer(track, in_flight)
        finally:
            in_flight.asking = False

    async def close(self) -> None:
        """Ends all uploads. An error of theirs goes to `stop`, not to the end of the event loop."""
        await end_all(self._tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _carry(self, track: FragmentTrack, in_flight: InFlight) -> None:
        try:
            setting = Compression.of(self._core.settings.compression)
            link = track.shard.link
            messages = partial(_messages, link.speed, compressed=setting.applies(fast=link.fast))
            in_flight.messages, mine = await asyncio.to_thread(messages, in_flight.taken, track.run)
        except CodecError as error:
            # A newer anchor does not help: the next gradient, or the optimizer's state, is not finite either.
            raise LearnerError(
                f"training has diverged: {error} in fragment {track.fragment}; restart this learner to continue from "
                "the run's parameters, and lower its learning rate if this recurs"
            ) from error
        in_flight.table = await self._coordination.table(track, in_flight.seq, mine)
        if track.run.frames or self._coordination.owners.rank == 0:
            await self._offer(track, in_flight)

    async def _offer(self, track: FragmentTrack, in_flight: InFlight) -> None:
        """Pushes a contribution until a receipt arrives or the contribution is no longer in flight."""
        once, failed = partial(self._push, track, in_flight), partial(self._failed, track, in_flight)
        await retry(self._core, track, lambda: track.in_flight is in_flight, once, failed, self._rng)

    async def _push(self, track: FragmentTrack, in_flight: InFlight) -> bool:
        """Offers the contribution and sends the frames that the core lacks. Returns whether a receipt arrived."""
        outstanding, offered = in_flight.taken.outstanding, track.shard.session

        def head() -> pb.PushHeader:
            # After a restore of the run, the header keeps the old session, so that the core refuses the work.
            same = track.shard.session.generation == offered.generation
            in_flight.session = track.shard.session if same else offered
            return pb.PushHeader(
                session=in_flight.session,
                fragment=track.fragment,
                seq=in_flight.seq,
                cycle=in_flight.taken.cycle,
                base_version=outstanding.base_version,
                tokens=outstanding.tokens,
                steps=outstanding.steps,
                codec=self._core.settings.codec,
                frames=len(in_flight.table),
                size_bytes=sum(length for length, _ in in_flight.table),
                digest=frame_codec.frames_digest(in_flight.table),
                units=[pb.UnitRange(lease=n, after=after, upto=upto) for n, after, upto in in_flight.taken.units],
            )

        def sent(index: int) -> None:
            self._counters.bytes_up += in_flight.table[index][0]

        name = self._name(track, in_flight)
        log.debug("sending a contribution", contribution=name, cycle=in_flight.taken.cycle, tokens=outstanding.tokens)
        receipt = await upload(track.shard.link, head, in_flight.messages, sent, known=in_flight.acknowledged)
        if receipt is None:
            return False
        log.debug("the core acknowledged a contribution", contribution=name)
        self._acknowledged(in_flight)
        self.decided(track.shard, receipt)
        return True

    def _failed(self, track: FragmentTrack, in_flight: InFlight, failure: Failure) -> bool:
        error, name = failure.error, self._name(track, in_flight)
        self._counters.last_error = one_line(error)
        if track.in_flight is not in_flight:
            return True  # the contribution's fate became known in the meantime
        match failure.remedy:
            case Remedy.DROP_WORK:
                log.warning("dropped outstanding work: the core refused it", contribution=name, detail=detail(error))
                self._drop(track)
            case Remedy.GIVE_UP:
                log.error("the core refused a contribution", contribution=name, detail=detail(error))
                self.end(track, merged=False)
            case Remedy.JOIN_AGAIN:
                track.shard.lose(in_flight.session)
            case _:
                return False
        return True

    # ------------------------------------------------------------------------------ fates

    def decided(self, shard: ShardView, receipt: pb.Receipt) -> None:
        """Applies a receipt if it is a refusal. A merge takes effect when its published update arrives."""
        track = shard.track(receipt.fragment)
        if (
            track.in_flight is None
            or track.in_flight.seq != receipt.seq
            or receipt.incarnation != shard.session.incarnation
        ):
            return
        if receipt.fate == pb.FATE_REFUSED:
            self._counters.last_error = receipt.reason
            name = self._name(track, track.in_flight)
            log.warning("the core refused a contribution", contribution=name, reason=receipt.reason)
            if receipt.drop_outstanding:
                self._drop(track)
            else:
                self.end(track, merged=False)

    def end(self, track: FragmentTrack, *, merged: bool) -> None:
        """Records the fate of the contribution in flight. Refused work can be sent again immediately."""
        assert track.in_flight is not None, "no contribution is in flight"
        in_flight, track.in_flight = track.in_flight, None
        self._acknowledged(in_flight)
        self._counters.pending -= 1
        if merged:
            log.debug("the core merged a contribution", contribution=self._name(track, in_flight))
            self._counters.merged += 1
            track.merged = in_flight.seq
        else:
            self._counters.refused += 1
            self._exchange.release(track.fragment)
            self._ended_together(track, in_flight.seq, drop=False)

    def ended_elsewhere(self, track: FragmentTrack, seq: int, *, drop: bool) -> None:
        """Applies rank 0's message that a contribution ended without a merge. Rank 0 does not call this."""
        track.ended = max(track.ended, seq)
        if track.in_flight is None or track.in_flight.seq != seq:
            return
        if drop:
            self._drop(track)
        else:
            self.end(track, merged=False)

    def _ended_together(self, track: FragmentTrack, seq: int, *, drop: bool) -> None:
        track.ended = max(track.ended, seq)
        self._coordination.ended(track, seq, drop=drop)

    def forget(self, track: FragmentTrack) -> None:
        """Drops the contribution in flight if it was taken before a restore of the run."""
        if track.in_flight is not None and track.in_flight.taken.outstanding.restores < track.restores:
            self._drop(track)

    def _drop(self, track: FragmentTrack) -> None:
        """Drops refused work that can never be merged. The learner must adopt the fragment before it sends again."""
        assert track.in_flight is not None, "no contribution is in flight"
        self._acknowledged(track.in_flight)
        in_flight, track.in_flight = track.in_flight, None
        self._ended_together(track, in_flight.seq, drop=True)
        self._counters.pending -= 1
        self._counters.refused += 1
        if self._coordination.fetches_to_drop(track):
            track.whole = track.drop = True
            self._fetch(track)

    def _name(self, track: FragmentTrack, in_flight: InFlight) -> str:
        return contribution_name(in_flight.session or track.shard.session, track.fragment, in_flight.seq)

    def _acknowledged(self, in_flight: InFlight) -> None:
        if not in_flight.acknowledged:
            in_flight.acknowledged = True
            self._exchange.settle(in_flight.taken)


def _messages(
    speed: LinkSpeed, taken: Submission, run: FrameRun, *, compressed: bool
) -> tuple[dict[int, EncodedFrame], tuple[tuple[int, int], ...]]:
    """Returns a run's coded frames as messages by frame number, and the length and CRC-32C of each payload."""
    contents = taken.outstanding.coded.contents
    payloads: list[tuple[Payload, ...]] = (
        [(payload,) for payload in speed.compressed(contents, frame_codec.compress)]
        if compressed
        else [*map(frame_codec.stored, contents)]
    )
    table = tuple((sum(map(len, payload)), crc32c_of(payload)) for payload in payloads)
    numbered = zip(run.frames, table, payloads, strict=True)
    return {span.index: EncodedFrame.of(span.index, crc, payload) for span, (_, crc), payload in numbered}, table
