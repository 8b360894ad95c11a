"""Readers of a fragment's published parameters while merges go on: what is read is left as it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable

from atoll_server.access.reader_limits import ReaderLimits
from atoll_server.access.refusals import Refused, Status
from atoll_server.merging.merge import FragmentState
from atoll_server.rpc.calls import ending
from atoll_server.shard.fragment import Fragment
from atoll_server.shard.work import Work

MAX_WAIT_S = 10.0  # with a merge that is being made durable, or a snapshot


class Readers:
    """Of all fragments of a shard."""

    def __init__(self, work: Work) -> None:
        """work: says whether a merge came to no end; what it left behind must not be read."""
        self._work = work
        self._versions = ReaderLimits()  # each theta_pub, by its identity

    @contextlib.asynccontextmanager
    async def newest(self, fragment: Fragment, reader: Hashable = None) -> AsyncIterator[FragmentState]:
        """A fragment's newest durable version; while it lasts its theta_pub, and nothing else of it, stays as it is.

        reader: a learner, which reads few versions of it at a time; None: it is soon done. Raises Refused when it
        cannot be had soon.
        """
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await fragment.lock.acquire()
        except TimeoutError as error:
            text = f"fragment {fragment.index} is being merged, and its ledger's disk is slow: try again"
            raise Refused(Status.UNAVAILABLE, text) from error
        try:
            if self._work.failed:
                raise Refused(Status.UNAVAILABLE, "the core has failed, and stops: try again later")
            state = fragment.state
        except BaseException:
            fragment.lock.release()
            raise
        who = reader if reader is not None else object()
        with self._versions.read(who, fragment.index, id(state.theta_pub), ending()):
            fragment.lock.release()  # not before: a merge looks who reads
            yield state

    def any_of(self, state: FragmentState) -> bool:
        """Whether a reader has it: a merge writes the next one to memory of its own."""
        return self._versions.reads(id(state.theta_pub))

    def passed(self, fragment: int) -> None:
        """A merge wrote the next one."""
        self._versions.passed(fragment)
