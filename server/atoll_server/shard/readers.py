"""Lets calls read published parameters while merges continue. Merges do not change arrays that are being read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable

from atoll_server.access.reader_limits import ReaderLimits
from atoll_server.access.refusals import Refused, Status
from atoll_server.merging.merge import FragmentState
from atoll_server.rpc.calls import ending
from atoll_server.shard.fragment import Fragment
from atoll_server.shard_context.work import Work

MAX_WAIT_S = 10.0  # limit on the wait for a merge or a snapshot that holds the fragment's lock
MAX_OLD_OF_READERS = 2  # old versions that stay in memory only for readers that are not learners


class Readers:
    """The current readers of one shard's fragments."""

    def __init__(self, work: Work) -> None:
        """work: the shard's tasks. After a task has failed, fragments may be partly changed and must not be read."""
        self._work = work
        self._versions = ReaderLimits()  # identifies each version by the id of its theta_pub array
        # Readers that are not learners have separate limits, so that they cannot end a learner's read.
        self._followed = ReaderLimits(MAX_OLD_OF_READERS)

    @contextlib.asynccontextmanager
    async def newest(self, fragment: Fragment, reader: Hashable = None) -> AsyncIterator[FragmentState]:
        """Context manager for a fragment's newest durable state.

        Merges do not change the state's theta_pub during the block, but may change its other arrays. reader: the
        learner that reads, which may read only a few versions at a time; None for a reader without this limit. Raises
        Refused if the state does not become available within MAX_WAIT_S.
        """
        async with self._read(fragment, self._versions, reader if reader is not None else object()) as state:
            yield state

    @contextlib.asynccontextmanager
    async def newest_for_readers(self, fragment: Fragment) -> AsyncIterator[FragmentState]:
        """Does the same as `newest` for a reader that is not a learner.

        All such readers share one limit on old versions.
        """
        async with self._read(fragment, self._followed, object()) as state:
            yield state

    @contextlib.asynccontextmanager
    async def _read(self, fragment: Fragment, versions: ReaderLimits, reader: Hashable) -> AsyncIterator[FragmentState]:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await fragment.lock.acquire()
        except TimeoutError as error:
            text = f"fragment {fragment.index} is busy with a merge or a snapshot: try again"
            raise Refused(Status.UNAVAILABLE, text) from error
        try:
            if self._work.failed:
                raise Refused(Status.UNAVAILABLE, "the core failed and is stopping: try again later")
            state = fragment.state
        except BaseException:
            fragment.lock.release()
            raise
        with versions.read(reader, fragment.index, id(state.theta_pub), ending()):
            fragment.lock.release()  # only now, since a merge calls `any_of` while it holds the lock
            yield state

    def any_of(self, state: FragmentState) -> bool:
        """Returns whether any reader uses this state. If so, a merge must write the next theta_pub to new memory."""
        return any(versions.reads(id(state.theta_pub)) for versions in (self._versions, self._followed))

    def passed(self, fragment: int) -> None:
        """Records that a merge replaced a version that is being read."""
        self._versions.passed(fragment)
        self._followed.passed(fragment)
