"""What is fetched from the core once, for all learners of a region: frames as they come, in bounded memory.

A fetch that is cut leaves the frames that came: the next one asks the core for the others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import UPDATES_KEPT
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import WireFrame


class CacheKey(NamedTuple):
    """What stays the same under this name, as long as its shard has this log: an update, or a whole fragment.

    crc32c: of a whole fragment.
    """

    run: str
    generation: int
    fragment: int
    whole: bool
    version: int
    crc32c: int = 0


class CacheFullError(Exception):
    """It does not fit beside what others still read."""


class CorruptFetchError(Exception):
    """It did not come as it should have: ask again."""


class CachedFetch:
    """One of them, as far as it is here. messages: its frames as they are sent on; empty: not here yet."""

    def __init__(self, place: CacheKey, count: int, make_room: Callable[[CachedFetch, int], None]) -> None:
        self.place, self.header, self.readers = place, pb.FetchHeader(), 0
        self.messages = [b""] * count
        self._make_room = make_room
        self._coming: set[int] = set()  # frames that are being fetched
        self._error: Callable[[], Exception] = CorruptFetchError  # of the fetch that failed last
        self._news = asyncio.Event()

    @property
    def size_bytes(self) -> int:
        """As its header declares: 0 before that is here."""
        return self.header.size_bytes

    @property
    def idle(self) -> bool:
        """Whether neither a learner nor a fetch needs it."""
        return not self.readers and not self._coming

    def claim(self, wanted: Iterable[int]) -> list[int]:
        """The frames among these that must be fetched: they are neither here nor coming. Now they are coming."""
        claimed = [index for index in wanted if not self.messages[index] and index not in self._coming]
        self._coming.update(claimed)
        return claimed

    def took(self, header: pb.FetchHeader, frame: WireFrame | pb.Frame) -> None:
        """One frame came. Raises CacheFullError, and CorruptFetchError for a frame of something else."""
        if not self.header.frames:
            if (header.version, header.frames) != (self.place.version, len(self.messages)):
                raise CorruptFetchError
            self._make_room(self, header.size_bytes)
            self.header.CopyFrom(header)
        elif (header.version, header.crc32c) != (self.header.version, self.header.crc32c):
            raise CorruptFetchError
        self.messages[frame.index] = frame_messages.encode(frame.index, frame.crc32c, frame.payload)
        self._coming.discard(frame.index)
        self._tell()

    def failed(self, claimed: Iterable[int], error: Callable[[], Exception]) -> None:
        """A fetch of these frames ended early: who waits for one of them is told why. What is here stays."""
        self._error = error
        self._coming.difference_update(claimed)
        self._tell()

    async def begun(self) -> pb.FetchHeader:
        """Its header, once that is here. Raises what `read` raises."""
        while not self.header.frames:
            if not self._coming:
                raise self._error()
            await self._news.wait()
        return self.header

    async def read(self, wanted: Sequence[int]) -> AsyncIterator[bytes]:
        """These frames, some in a message, as soon as they are here. Raises an error above, LinkLost, or the core's."""
        self.readers += 1
        try:
            while wanted:
                while not self.messages[wanted[0]]:
                    if wanted[0] not in self._coming:
                        raise self._error()
                    await self._news.wait()
                here = takewhile(bool, (self.messages[index] for index in wanted))
                count = frame_messages.count_fitting(map(len, here))
                yield b"".join(self.messages[index] for index in wanted[:count])
                wanted = wanted[count:]
        finally:
            self.readers -= 1

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class FetchCache:
    """Items by place; the one that was asked for longest ago goes first, unless somebody reads it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._items: OrderedDict[CacheKey, CachedFetch] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Of all that is here or declared."""
        return sum(item.size_bytes for item in self._items.values())

    def find(self, place: CacheKey) -> CachedFetch | None:
        """What is here, or on its way."""
        item = self._items.get(place)
        if item is not None:
            self._items.move_to_end(place)
        return item

    def begin(self, place: CacheKey, count: int) -> CachedFetch:
        """A place for something of so many frames, none of which is here. Of many versions the oldest goes.

        The limit in bytes is not enough: beside its frames an item takes some kilobytes.
        """
        same = sorted(other for other in self._items if other[:4] == place[:4] and other != place)
        for old in same[: max(0, len(same) + 1 - UPDATES_KEPT)]:
            del self._items[old]
        item = self._items[place] = CachedFetch(place, count, self._make_room)
        return item

    def drop(self, item: CachedFetch) -> None:
        """It is not found here any more; who reads it still does."""
        if self._items.get(item.place) is item:
            del self._items[item.place]

    def clear(self, fragments: Collection[int] | None) -> None:
        """Nothing of these fragments is found any more, of all if None; who reads it still does."""
        for item in [each for each in self._items.values() if fragments is None or each.place.fragment in fragments]:
            self.drop(item)

    def _make_room(self, newcomer: CachedFetch, size_bytes: int) -> None:
        idle = [item for item in self._items.values() if item.idle and item is not newcomer]
        while self.size_bytes + size_bytes > self._limit_bytes:
            if not idle:
                raise CacheFullError
            self.drop(idle.pop(0))
