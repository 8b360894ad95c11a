"""Fetches published updates and whole fragments, and prepares anchors for adoption.

The Fetcher adds updates one at a time, in order. The result must have the checksum that the core published. If an
update is missing or the checksum differs, the Fetcher fetches the whole fragment. An interrupted fetch continues with
the missing frames.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.process.tasks import end_all, first_ended

from atoll.agent.coordination import Coordination
from atoll.agent.core_view import CoreView, FragmentTrack, InFlight
from atoll.agent.sending import Sender
from atoll.errors import NONSENSE, LearnerError
from atoll.fragments.adoption import Change, Fate, PreparedAnchor
from atoll.fragments.exchange import ThreadExchange
from atoll.fragments.segments import Coded, Coder, FragmentShape
from atoll.stats import Counters
from atoll.transfers.call_errors import Remedy, one_line
from atoll.transfers.frame_requests import receive
from atoll.transfers.partial_fetch import MAX_UPDATES, Decoded, FrameRequest, PartialFetch
from atoll.transfers.retry_loop import Failure, retry

log = structlog.get_logger()

MANY = 3  # consecutive failures of one fetch before a warning
MAX_AHEAD = 2  # versions of a fragment that a rank prepares before other ranks have prepared them; limits memory


class Fetcher:
    """Brings each fragment up to its newest announced version.

    stop: called with the error that ends the learner. coder: computes the changes to the parameters.
    """

    def __init__(
        self,
        core: CoreView,
        exchange: ThreadExchange,
        counters: Counters,
        stop: Callable[[Exception], None],
        sender: Sender,
        coordination: Coordination,
        coder: Coder,
    ) -> None:
        self._core = core
        self._coordination = coordination
        self._coder = coder
        self._exchange = exchange
        self._counters = counters
        self._stop = stop
        self._sender = sender
        self._rng = random.Random()  # noqa: S311 - jitter
        self._at_once = asyncio.Semaphore(2)  # limit on simultaneous fetches, which limits memory
        self._shapes: dict[int, FragmentShape] = {}

    def heard_of(self, track: FragmentTrack, version: int) -> None:
        """Records an announced version and fetches it if it is new. A lower version changes nothing."""
        track.target = max(track.target, version)
        self._coordination.announced(track)
        self.begin(track)

    def heard_after_break(self, track: FragmentTrack, version: int, known: int) -> None:
        """Records the newest version after an outage, which may be lower. See FragmentTrack.stands_at."""
        track.stands_at(version, known)
        self._coordination.announced(track)
        self.begin(track)

    def begin(self, track: FragmentTrack) -> None:
        """Starts a task that brings the track up to date, unless one is running or nothing can be fetched now."""
        if track.run.frames and self._may_fetch(track) and track.fetching is None:
            track.fetching = asyncio.get_running_loop().create_task(self._bring(track))
            track.fetching.add_done_callback(self._ended)

    def _may_fetch(self, track: FragmentTrack) -> bool:
        """Returns whether the track is behind, and the other ranks are not too far behind this one."""
        ahead = self._coordination.owners.size > 1 and self._exchange.unconfirmed(track.fragment) >= MAX_AHEAD
        return track.behind() and (not ahead or track.whole or track.version < track.skipped_to)

    async def close(self) -> None:
        """Ends all fetches. An error of theirs goes to `stop`, not to the end of the event loop."""
        tracks = self._core.tracks.values()
        await end_all([task for track in tracks for task in (track.fetching, track.copying) if task is not None])

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def opened(self, track: FragmentTrack) -> None:
        """Starts the work that all ranks can do before a step boundary answers the fragment's round."""
        work = None if self._counters.paused else self._coder.ahead(track.anchor, self._shape(track))
        if work is None:
            return
        self._coordination.opened(track)
        if len(track.anchor) == track.run.length > 0:
            track.copying = asyncio.get_running_loop().create_task(asyncio.to_thread(work))
            track.copying.add_done_callback(self._ended)

    def _shape(self, track: FragmentTrack) -> FragmentShape:
        if track.fragment not in self._shapes:
            self._shapes[track.fragment] = FragmentShape.of(track.run, Codec(self._core.settings.codec))
        return self._shapes[track.fragment]

    async def all_here(self) -> None:
        """Waits until all fetches have ended. Raises a failed fetch's error. Cancelling this wait stops no fetch."""
        while running := [track.fetching for track in self._core.tracks.values() if track.fetching is not None]:
            await first_ended(running, asyncio.FIRST_EXCEPTION)

    async def _bring(self, track: FragmentTrack) -> None:
        once, failed, came = partial(self._once, track), partial(self._failed, track), partial(_came, track)
        try:
            while self._may_fetch(track) and not self._core.leaving:
                await retry(self._core, track, track.behind, once, failed, self._rng, came)
        finally:
            track.fetching = None

    async def _once(self, track: FragmentTrack) -> bool:
        async with self._at_once:
            sound = await self._step(track)
        if not sound:
            self._counters.mismatches += 1
            track.whole = True
        return sound

    def _failed(self, track: FragmentTrack, failure: Failure) -> bool:
        match failure.remedy:
            case Remedy.FETCH_WHOLE | Remedy.GIVE_UP | Remedy.DROP_WORK if not track.whole:
                track.whole = True
            case Remedy.JOIN_AGAIN:
                track.shard.lose(failure.session)
            case _:
                self._counters.last_error = one_line(failure.error)
                if failure.before == MANY:
                    log.warning("a fetch keeps failing", fragment=track.fragment, error=one_line(failure.error))
                return False
        return True

    async def _step(self, track: FragmentTrack) -> bool:
        """Fetches one update or the whole fragment. Returns False if the result is invalid."""
        if track.target - track.version > MAX_UPDATES:
            track.whole = True
        incoming, setbacks = self._incoming(track), track.setbacks
        while (ask := incoming.next(track.target)) is not None:
            if not await self._ask(track, incoming, ask):
                track.incoming = None
                return False
        track.incoming = None
        return await self._take_in(track, incoming, setbacks)

    def _incoming(self, track: FragmentTrack) -> PartialFetch:
        """Returns the frames that earlier attempts at this fetch received, or an empty fetch."""
        version = 0 if track.whole else track.version + 1
        if track.incoming is None or track.incoming.version != version:
            track.incoming = PartialFetch(track.run, Codec(self._core.settings.codec), version)
        return track.incoming

    async def _ask(self, track: FragmentTrack, incoming: PartialFetch, ask: FrameRequest) -> bool:
        """Fetches the requested frames. Returns False if the core sent different frames. Raises AioRpcError and
        LinkLost."""
        if track.shard.lost.is_set():  # while this fetch waited for others
            raise LinkLost("the session has ended")
        request = pb.FetchRequest(
            session=track.shard.session, fragment=track.fragment, version=ask.version, whole=not ask.version
        )
        before = incoming.size_bytes
        try:
            return await receive(track.shard.link, request, incoming, ask)
        finally:
            if incoming.version:
                self._counters.bytes_down += incoming.size_bytes - before
            else:
                self._counters.bytes_whole += incoming.size_bytes - before

    async def _take_in(self, track: FragmentTrack, incoming: PartialFetch, setbacks: int) -> bool:
        whole, header, merged = not incoming.version, incoming.header, self._merged(track, incoming.header)
        q = None if merged is None else merged.taken.outstanding.coded
        decoded, change = await asyncio.to_thread(self._decoded, track, incoming, q)
        if decoded is None or not self._coordination.sound(header, decoded.checksum):
            log.error("the checksum of an anchor is wrong: fetching the whole fragment", fragment=track.fragment)
            return False
        if track.setbacks != setbacks:
            return True  # in the meantime, a restore of the core removed this version
        fate = self._fate(track, header, whole=whole)
        track.anchor, track.version = decoded.values, header.version
        if track.setbacks != setbacks:
            track.whole = True
        else:
            track.target = max(track.target, header.version)
            if whole:
                track.whole = track.drop = False
        prepared = PreparedAnchor(track.fragment, header.version, decoded.values, fate, change, header.crc32c)
        self._exchange.offer(prepared, confirmed=self._coordination.owners.size == 1)
        self._coordination.prepared(track, header, decoded.checksum)
        return True

    def _decoded(
        self, track: FragmentTrack, incoming: PartialFetch, q: Coded | None
    ) -> tuple[Decoded | None, Change | None]:
        """Returns the fetched values and the change to the parameters. Runs in a worker thread."""
        old = track.anchor
        decoded = incoming.decoded(old if incoming.version else None)
        if decoded is None or len(decoded.values) != len(old):
            return decoded, None  # the values are invalid, or this is the first anchor
        most = 1 if decoded.update is None else self._coder.max_changes_ahead
        if self._exchange.waits(track.fragment) or self._exchange.waiting >= most:
            return decoded, None  # the step boundary computes it: during a long evaluation, all fragments may wait
        values = self._coder.change(old, decoded.values, decoded.update, q, self._shape(track))
        return decoded, Change(old, q, values)

    def _merged(self, track: FragmentTrack, header: pb.FetchHeader) -> InFlight | None:
        """Returns the contribution in flight if the header says that it was merged."""
        in_flight, session = track.in_flight, track.shard.session
        if in_flight is None:
            return None
        mine = (session.learner, session.incarnation, in_flight.seq, pb.FATE_MERGED)
        said = ((receipt.learner, receipt.incarnation, receipt.seq, receipt.fate) for receipt in header.receipts)
        if mine not in said:
            return None
        if not in_flight.messages:
            raise LearnerError(f"the core merged a contribution that was not sent: {NONSENSE}")
        return in_flight

    def _fate(self, track: FragmentTrack, header: pb.FetchHeader, *, whole: bool) -> Fate:
        """Returns what became of the contribution in flight at this version. Applies any refusal in the header."""
        if (merged := self._merged(track, header)) is not None:
            self._sender.end(track, merged=True)
            return Fate(merged.taken.outstanding.coded, whole and track.drop, track.restores)
        for receipt in header.receipts:
            if receipt.learner == track.shard.session.learner:
                self._sender.decided(track.shard, receipt)
        return Fate(None, whole and track.drop, track.restores)


def _came(track: FragmentTrack) -> int:
    """Returns the number of bytes that the current fetch has received. An attempt that receives bytes counts as
    progress."""
    return track.incoming.size_bytes if track.incoming is not None else 0
