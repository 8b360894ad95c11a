"""Limits the calls of all readers of a process together, so that readers never use up what learners need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import prometheus_client

from atoll_server.access.refusals import Refused, Status


class ReaderSlots:
    """The slots for readers' long calls. limited: counter of refusals, by limit.

    watches: limit on readers that watch. reads: limit on streams that fetch. max_wait_s: longest wait for a slot.
    """

    def __init__(self, watches: int, reads: int, max_wait_s: float, limited: prometheus_client.Counter) -> None:
        self._most_watches = watches
        self._most_reads = reads
        self._max_wait_s = max_wait_s
        self._limited = limited
        self._watches = 0
        self._reads = asyncio.Semaphore(reads)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that occupies a slot for one reader's Watch call. Raises Refused if none is free."""
        if self._watches >= self._most_watches:
            text = (
                f"{self._most_watches} readers already watch this address: use another front, or raise --limit-readers"
            )
            raise self._over("readers", text)
        self._watches += 1
        try:
            yield
        finally:
            self._watches -= 1

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Context manager that occupies the slot of one stream. Raises Refused if none becomes free."""
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._reads.acquire()
        except TimeoutError as error:
            text = f"readers already fetch with {self._most_reads} streams: try again later, or raise --limit-reads"
            raise self._over("reads", text) from error
        try:
            yield
        finally:
            self._reads.release()

    def _over(self, limit: str, text: str) -> Refused:
        self._limited.labels(limit).inc()
        return Refused(Status.RESOURCE_EXHAUSTED, text)
