"""Contributions on their way out: coded once, then sent until the core acknowledges or refuses them.

An upload of unknown fate is never replaced: the same bytes under the same key are offered again, and the core says
which frames it has, or what became of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import structlog
from atoll_wire import codec, frames
from atoll_wire import outer_pb2 as pb
from atoll_wire.checksums import crc32c
from atoll_wire.layout import FrameRun
from atoll_wire.logs import contribution
from atoll_wire.streams import upload

from atoll.agent.calls import Cure, detail, one_line
from atoll.agent.core_state import CoreView, Flight, FragmentTrack, ShardView
from atoll.agent.retrying import Failure, retry
from atoll.fragments.exchange import Handover, Taken
from atoll.fragments.segments import Coded
from atoll.stats import Counters

log = structlog.get_logger()


class Sender:
    """One contribution of each fragment at a time."""

    def __init__(
        self,
        core: CoreView,
        handover: Handover,
        counters: Counters,
        stop: Callable[[Exception], None],
        fetch: Callable[[FragmentTrack], None],
    ) -> None:
        """stop: ends the learner. fetch: brings a track up to date, whole if it says so."""
        self._core, self._handover, self._counters = core, handover, counters
        self._stop, self._fetch = stop, fetch
        self._rng = random.Random()  # noqa: S311 - jitter
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, track: FragmentTrack, taken: Taken) -> None:
        """Takes a pseudo-gradient on; returns at once. One that was handed over before is on its way."""
        if taken.received:
            return
        taken.received = True
        if taken.outstanding.restores != track.restores:
            self._left_behind(track, taken)
            return
        assert track.flight is None, "at most one contribution of a fragment is in flight"
        track.seq += 1
        track.flight = Flight(taken, track.seq)
        self._counters.pending += 1
        task = asyncio.get_running_loop().create_task(self._carry(track, track.flight))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _left_behind(self, track: FragmentTrack, taken: Taken) -> None:
        """It was trained from parameters that the run does not have any more: it goes with the next adoption."""
        log.info("work of before the run was restored is given up", fragment=track.fragment)
        self._handover.settle(taken)
        track.whole = track.drop = True
        self._fetch(track)

    def ask_again(self, shard: ShardView) -> None:
        """After a shard was away: what became of contributions that it had acknowledged?"""
        for track in shard.tracks.values():
            if track.flight is not None and track.flight.acknowledged and not track.flight.asking:
                track.flight.asking = True
                task = asyncio.get_running_loop().create_task(self._ask(track, track.flight))
                self._tasks.add(task)
                task.add_done_callback(self._ended)

    async def _ask(self, track: FragmentTrack, flight: Flight) -> None:
        # Until it is known: a refusal that nobody hears would leave the fragment in flight for ever.
        try:
            await self._offer(track, flight)
        finally:
            flight.asking = False

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _carry(self, track: FragmentTrack, flight: Flight) -> None:
        flight.messages, flight.table = await asyncio.to_thread(_messages, flight.taken.outstanding.coded, track.run)
        await self._offer(track, flight)

    async def _offer(self, track: FragmentTrack, flight: Flight) -> None:
        """Pushes until the core has answered, or the fate came another way."""
        once, failed = partial(self._push, track, flight), partial(self._failed, track, flight)
        await retry(self._core, track, lambda: track.flight is flight, once, failed, self._rng)

    async def _push(self, track: FragmentTrack, flight: Flight) -> bool:
        """Offers the contribution, sends the frames that the core lacks, and takes in what it answers, if it does."""
        outstanding, offered = flight.taken.outstanding, track.shard.session

        def head() -> pb.PushHeader:
            # When its turn comes the run may have been restored: then the core refuses it with the session of before.
            same = track.shard.session.generation == offered.generation
            flight.session = track.shard.session if same else offered
            return pb.PushHeader(
                session=flight.session, fragment=track.fragment, seq=flight.seq, cycle=flight.taken.cycle,
                base_version=outstanding.base_version, tokens=outstanding.tokens, steps=outstanding.steps,
                codec=self._core.settings.codec, frames=len(flight.table),
                size_bytes=sum(length for length, _ in flight.table), digest=codec.frames_digest(flight.table),
            )  # fmt: skip

        def sent(index: int) -> None:
            self._counters.bytes_up += flight.table[index][0]

        name = self._name(track, flight)
        log.debug("sending", contribution=name, cycle=flight.taken.cycle, tokens=outstanding.tokens)
        receipt = await upload(track.shard.link, head, flight.messages, sent, known=flight.acknowledged)
        if receipt is None:
            return False
        log.debug("acknowledged", contribution=name)
        self._acknowledged(flight)
        self.decided(track.shard, receipt)
        return True

    def _failed(self, track: FragmentTrack, flight: Flight, failure: Failure) -> bool:
        error, name = failure.error, self._name(track, flight)
        self._counters.last_error = one_line(error)
        if track.flight is not flight:
            return True  # its fate came another way meanwhile
        match failure.cure:
            case Cure.DROP_WORK:
                log.warning("outstanding work is given up", contribution=name, detail=detail(error))
                self._drop(track)
            case Cure.GIVE_UP:
                log.error("contribution refused", contribution=name, detail=detail(error))
                self.end(track, merged=False)
            case Cure.JOIN_AGAIN:
                track.shard.lose(flight.session)
            case _:
                return False
        return True

    # ------------------------------------------------------------------------------ fates

    def decided(self, shard: ShardView, receipt: pb.Receipt) -> None:
        """A receipt that came outside of an update: acts on a refusal; a merge is left to its update."""
        track = shard.track(receipt.fragment)
        if track.flight is None or track.flight.seq != receipt.seq or receipt.incarnation != shard.session.incarnation:
            return
        if receipt.fate == pb.FATE_REFUSED:
            self._counters.last_error = receipt.reason
            log.warning("contribution refused", contribution=self._name(track, track.flight), reason=receipt.reason)
            if receipt.drop_outstanding:
                self._drop(track)
            else:
                self.end(track, merged=False)

    def end(self, track: FragmentTrack, *, merged: bool) -> None:
        """The flight is over. A merge is adopted with its update; refused work is free at once."""
        assert track.flight is not None, "only a flight can end"
        flight, track.flight = track.flight, None
        self._acknowledged(flight)
        self._counters.pending -= 1
        if merged:
            log.debug("merged", contribution=self._name(track, flight))
            self._counters.merged += 1
        else:
            self._counters.refused += 1
            self._handover.release(track.fragment)

    def forget(self, track: FragmentTrack) -> None:
        """Another generation: what was in flight means nothing any more."""
        if track.flight is not None:
            self._drop(track)

    def _drop(self, track: FragmentTrack) -> None:
        """Refused for good: the work goes with the next adoption, of the whole fragment; until then nothing is sent."""
        assert track.flight is not None, "only a flight can be dropped"
        self._acknowledged(track.flight)
        track.flight = None
        self._counters.pending -= 1
        self._counters.refused += 1
        track.whole = track.drop = True
        self._fetch(track)

    def _name(self, track: FragmentTrack, flight: Flight) -> str:
        return contribution(flight.session or track.shard.session, track.fragment, flight.seq)

    def _acknowledged(self, flight: Flight) -> None:
        if not flight.acknowledged:
            flight.acknowledged = True
            self._handover.settle(flight.taken)


def _messages(coded: Coded, run: FrameRun) -> tuple[dict[int, bytes], tuple[tuple[int, int], ...]]:
    """Frames of a run as they are sent, by their numbers in the fragment; length and CRC-32C of their payloads."""
    payloads = list(map(codec.compress, coded.contents))
    table = tuple((len(payload), crc32c(payload)) for payload in payloads)
    numbered = zip(run.frames, table, payloads, strict=True)
    return {span.index: frames.encode(span.index, crc, payload) for span, (_, crc), payload in numbered}, table
