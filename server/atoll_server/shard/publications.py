"""Encodes published updates in the form that learners receive, and keeps them in a bounded cache.

An update is compressed once for all learners, unless only fast links fetch it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.messages import frame_messages
from atoll_wire.messages.frame_messages import fetch_reply, frames_in

from atoll_server.merging.merge import Update


@dataclass(frozen=True, slots=True)
class Publication:
    """A published update, encoded once for all learners.

    messages: one encoded message per frame. sizes: payload bytes per frame. crc32c: checksum of the fragment's
    published parameters after the update. compressed: whether the payloads are compressed. receipts: receipts for
    pending contributions that were merged or refused since the previous update.
    """

    version: int
    messages: tuple[bytes, ...]
    sizes: tuple[int, ...]
    crc32c: int
    compressed: bool = False
    receipts: tuple[pb.Receipt, ...] = ()

    @classmethod
    def of(cls, update: Update, *, compressed: bool) -> Publication:
        """Returns the publication of an update, without receipts."""
        payloads = tuple(map(frame_codec.compressed, update.frames)) if compressed else update.frames
        messages = tuple(frame_messages.encode(n, crc32c(payload), payload) for n, payload in enumerate(payloads))
        return cls(update.version, messages, tuple(map(len, payloads)), update.crc32c, compressed)

    def compress(self) -> Publication:
        """Returns this publication with compressed payloads."""
        frames = (frame for message in self.messages for frame in frames_in(fetch_reply(message)))
        update = Update(self.version, tuple(bytes(frame.payload) for frame in frames), self.crc32c)
        return replace(Publication.of(update, compressed=True), receipts=self.receipts)

    @property
    def size_bytes(self) -> int:
        """The total size of all payloads in bytes."""
        return sum(self.sizes)


class UpdateCache:
    """A cache of published updates. Drops the oldest updates above a limit on bytes or on versions per fragment."""

    def __init__(self, limit_bytes: int, limit_versions: int) -> None:
        self.limit_bytes = limit_bytes
        self._limit_versions = limit_versions
        self._kept: OrderedDict[tuple[int, int], Publication] = OrderedDict()
        self.size_bytes = 0

    def add(self, fragment: int, publication: Publication) -> None:
        """Adds an update. A learner that needs a dropped update fetches the whole fragment."""
        version = publication.version
        self._kept[fragment, version] = publication
        self.size_bytes += publication.size_bytes
        self._drop((fragment, version - self._limit_versions))
        while self.size_bytes > self.limit_bytes and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def replace(self, fragment: int, publication: Publication) -> None:
        """Replaces an update by another form of it, unless the cache has dropped the update."""
        place = (fragment, publication.version)
        if (before := self._kept.get(place)) is not None:
            self._kept[place] = publication
            self.size_bytes += publication.size_bytes - before.size_bytes

    def get(self, fragment: int, version: int) -> Publication | None:
        """Returns the update that leads to `version`, or None if the cache has dropped this update."""
        return self._kept.get((fragment, version))

    def _drop(self, place: tuple[int, int]) -> None:
        dropped = self._kept.pop(place, None)
        if dropped is not None:
            self.size_bytes -= dropped.size_bytes
