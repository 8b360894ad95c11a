"""Fetches the newest announced version of each followed fragment.

Published updates are added one at a time, in order. Each result must have the published checksum. If an update is
missing or the checksum differs, the whole fragment is fetched.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.layout.frame_spans import Codec

from atoll.follower.cuts import FragmentValues
from atoll.follower.model_view import FollowedFragment, ModelView
from atoll.transfers.call_errors import Remedy, one_line
from atoll.transfers.frame_requests import receive
from atoll.transfers.partial_fetch import MAX_UPDATES, PartialFetch
from atoll.transfers.retry_loop import Failure, retry

log = structlog.get_logger()

MANY = 3  # after this many consecutive failures, the next failure of a fetch is logged as a warning
FETCHES = 2  # limit on simultaneous fetches, to limit memory


class FragmentFetches:
    """The fetches of all fragments.

    applied: called after each new version of a fragment. lost: called with a session whose generation the server does
    not know. stop: ends the follower with an error.
    """

    def __init__(
        self,
        view: ModelView,
        applied: Callable[[], None],
        lost: Callable[[pb.Session], None],
        stop: Callable[[Exception], None],
    ) -> None:
        self._view = view
        self._applied = applied
        self._lost = lost
        self._stop = stop
        self._rng = random.Random()  # noqa: S311 - jitter
        self._at_once = asyncio.Semaphore(FETCHES)

    def begin(self, fragment: FollowedFragment) -> None:
        """Starts a task that fetches the newest version, unless a task is running or the fragment is up to date."""
        if fragment.behind() and fragment.fetching is None:
            fragment.fetching = asyncio.get_running_loop().create_task(self._bring(fragment))
            fragment.fetching.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def end(self) -> None:
        """Cancels all fetches and waits until they have ended."""
        running = [each.fetching for each in self._view.fragments.values() if each.fetching is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _bring(self, fragment: FollowedFragment) -> None:
        once, failed, came = partial(self._once, fragment), partial(self._failed, fragment), partial(_came, fragment)
        try:
            while fragment.behind() and not self._view.leaving:
                await retry(self._view, fragment, fragment.behind, once, failed, self._rng, came)
        finally:
            fragment.fetching = None

    async def _once(self, fragment: FollowedFragment) -> bool:
        async with self._at_once:
            sound = await self._step(fragment)
        if not sound:
            log.error("a fragment's checksum is wrong: fetching the whole fragment", fragment=fragment.index)
            fragment.whole = True
            fragment.incoming = None
        return sound

    def _failed(self, fragment: FollowedFragment, failure: Failure) -> bool:
        match failure.remedy:
            case Remedy.FETCH_WHOLE | Remedy.GIVE_UP if not fragment.whole:
                fragment.whole = True
            case Remedy.JOIN_AGAIN:
                self._lost(failure.session)
            case _:
                if failure.before == MANY:
                    log.warning("a fetch keeps failing", fragment=fragment.index, error=one_line(failure.error))
                return False
        return True

    async def _step(self, fragment: FollowedFragment) -> bool:
        """Fetches one update, or the whole fragment. Returns False if the result is invalid."""
        if fragment.target - fragment.version > MAX_UPDATES:
            fragment.whole = True
        incoming, restarts = self._incoming(fragment), fragment.restarts
        while (ask := incoming.next(fragment.target)) is not None:
            session = fragment.shard.session
            request = pb.ReadRequest(
                run=session.run,
                generation=session.generation,
                fragment=fragment.index,
                version=ask.version,
                whole=not ask.version,
            )
            if not await receive(fragment.shard.link, request, incoming, ask):
                return False
        fragment.incoming = None
        decoded = await asyncio.to_thread(incoming.decoded, fragment.anchor if incoming.version else None)
        header = incoming.header
        if decoded is None or decoded.checksum != header.crc32c:
            return False
        if fragment.restarts == restarts:  # otherwise, the fragment may now have another history
            fragment.values = FragmentValues(header.version, decoded.checksum, decoded.values)
            fragment.target = max(fragment.target, header.version)
            if not incoming.version:
                fragment.whole = False
            self._applied()
        return True

    def _incoming(self, fragment: FollowedFragment) -> PartialFetch:
        """Returns the fetch with the frames that earlier attempts received, or a new fetch without frames."""
        version = 0 if fragment.whole else fragment.version + 1
        if fragment.incoming is None or fragment.incoming.version != version:
            fragment.incoming = PartialFetch(fragment.run, Codec(self._view.settings.codec), version)
        return fragment.incoming


def _came(fragment: FollowedFragment) -> int:
    """Returns the number of bytes that the current fetch has received."""
    return fragment.incoming.size_bytes if fragment.incoming is not None else 0
