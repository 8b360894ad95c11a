"""Caches updates and whole fragments, so that a front fetches each of them only once for its whole region.

The memory for cached frames is bounded. If a fetch is interrupted, the cache keeps the frames that have arrived. The
next fetch requests only the missing frames from the core.
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
    """The key of a cached update or whole fragment, whose bytes do not change while its shard keeps the same log.

    crc32c: checksum of a whole fragment; 0 for an update.
    """

    run: str
    generation: int
    fragment: int
    whole: bool
    version: int
    crc32c: int = 0


class CacheFullError(Exception):
    """The item does not fit into the cache, even if all other idle items are removed."""


class CorruptFetchError(Exception):
    """The core sent a different version or frames that were not requested. The caller must fetch again."""


class CachedFetch:
    """A cached update or whole fragment, complete or not. place: the item's key. count: number of frames of the item.

    messages: the encoded frames; b"" for a frame that has not arrived. readers: number of calls that read the item.
    """

    def __init__(self, place: CacheKey, count: int, make_room: Callable[[CachedFetch, int], None]) -> None:
        self.place = place
        self.header = pb.FetchHeader()
        self.readers = 0
        self.messages = [b""] * count
        self._make_room = make_room
        self._coming: set[int] = set()  # indices of frames that are being fetched
        self._error: Callable[[], Exception] = CorruptFetchError  # returns the error of the last failed fetch
        self._news = asyncio.Event()

    @property
    def size_bytes(self) -> int:
        """The size that the item's header declares; 0 before the header has arrived."""
        return self.header.size_bytes

    @property
    def idle(self) -> bool:
        """Whether neither a call nor a fetch uses the item."""
        return not self.readers and not self._coming

    def claim(self, wanted: Iterable[int]) -> list[int]:
        """Returns the wanted frames that the caller must fetch because they are neither stored nor being fetched."""
        claimed = [index for index in wanted if not self.messages[index] and index not in self._coming]
        self._coming.update(claimed)
        return claimed

    def took(self, header: pb.FetchHeader, frame: WireFrame | pb.Frame) -> None:
        """Stores a frame. header: header of the reply in which the core sent this frame.

        Raises CacheFullError if the item does not fit in the cache, and CorruptFetchError for a frame of a different
        version.
        """
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
        """Records that a fetch of these frames failed. Readers that wait for these frames raise `error()`."""
        self._error = error
        self._coming.difference_update(claimed)
        self._tell()

    async def begun(self) -> pb.FetchHeader:
        """Returns the item's header as soon as it has arrived. Raises the same errors as `read`."""
        while not self.header.frames:
            if not self._coming:
                raise self._error()
            await self._news.wait()
        return self.header

    async def read(self, wanted: Sequence[int]) -> AsyncIterator[bytes]:
        """Yields messages with the wanted frames as the frames arrive. wanted: indices of the frames.

        Raises CacheFullError, CorruptFetchError, LinkLost, or the core's AioRpcError.
        """
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
    """Cached items, keyed by CacheKey. If the cache is full, a new item replaces the least recently used idle items.

    limit_bytes: limit on the sum of the items' sizes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._items: OrderedDict[CacheKey, CachedFetch] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """The sum of the items' declared sizes."""
        return sum(item.size_bytes for item in self._items.values())

    def find(self, place: CacheKey) -> CachedFetch | None:
        """Returns the item with this key, even if it is incomplete, or None.

        Marks the item as the most recently used.
        """
        item = self._items.get(place)
        if item is not None:
            self._items.move_to_end(place)
        return item

    def recent(self, least: CacheKey) -> CacheKey | None:
        """Returns the key of the newest item of the same kind with at least the version of `least`, or None."""
        return max((place for place in self._items if place[:4] == least[:4] and place >= least), default=None)

    def begin(self, place: CacheKey, count: int) -> CachedFetch:
        """Adds an empty item for `count` frames and keeps at most UPDATES_KEPT versions of a fragment.

        The cache needs this limit because an item uses a few kilobytes that `limit_bytes` does not include.
        """
        same = sorted(other for other in self._items if other[:4] == place[:4] and other != place)
        for old in same[: max(0, len(same) + 1 - UPDATES_KEPT)]:
            del self._items[old]
        item = self._items[place] = CachedFetch(place, count, self._make_room)
        return item

    def drop(self, item: CachedFetch) -> None:
        """Removes an item. Its current readers can finish."""
        if self._items.get(item.place) is item:
            del self._items[item.place]

    def clear(self, fragments: Collection[int] | None) -> None:
        """Removes the items of these fragments, or all items if `fragments` is None.

        The current readers of an item can finish.
        """
        for item in [each for each in self._items.values() if fragments is None or each.place.fragment in fragments]:
            self.drop(item)

    def _make_room(self, newcomer: CachedFetch, size_bytes: int) -> None:
        idle = [item for item in self._items.values() if item.idle and item is not newcomer]
        while self.size_bytes + size_bytes > self._limit_bytes:
            if not idle:
                raise CacheFullError
            self.drop(idle.pop(0))
