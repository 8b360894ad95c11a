"""What learners can hear and fetch: a bounded log of happenings, and a bounded cache of published updates."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from atoll_wire import frames
from atoll_wire import outer_pb2 as pb
from atoll_wire.checksums import crc32c

from atoll_server.merging.merge import Update


@dataclass(frozen=True, slots=True)
class Publication:
    """A published update as it is sent to everybody, with the fates that its merge decided.

    messages: its frames; sizes: of their payloads; crc32c: of the published parameters after it.
    """

    version: int
    messages: tuple[bytes, ...]
    sizes: tuple[int, ...]
    crc32c: int
    receipts: tuple[pb.Receipt, ...] = ()

    @classmethod
    def of(cls, update: Update) -> Publication:
        """Without fates."""
        messages = tuple(frames.encode(n, crc32c(payload), payload) for n, payload in enumerate(update.frames))
        return cls(update.version, messages, tuple(map(len, update.frames)), update.crc32c)

    @property
    def size_bytes(self) -> int:
        """Of all payloads."""
        return sum(self.sizes)


class UpdateCache:
    """Updates by (fragment, version), the oldest dropped first when there are too many bytes or versions."""

    def __init__(self, limit_bytes: int, limit_versions: int) -> None:
        self.limit_bytes, self._limit_versions = limit_bytes, limit_versions
        self._kept: OrderedDict[tuple[int, int], Publication] = OrderedDict()
        self.size_bytes = 0

    def add(self, fragment: int, publication: Publication) -> None:
        """Keeps an update; a learner that needs one dropped here fetches the fragment whole."""
        version = publication.version
        self._kept[fragment, version] = publication
        self.size_bytes += publication.size_bytes
        self._drop((fragment, version - self._limit_versions))
        while self.size_bytes > self.limit_bytes and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def get(self, fragment: int, version: int) -> Publication | None:
        """The update that leads to `version`, if it is still here."""
        return self._kept.get((fragment, version))

    def _drop(self, place: tuple[int, int]) -> None:
        dropped = self._kept.pop(place, None)
        if dropped is not None:
            self.size_bytes -= dropped.size_bytes


BEAT_S = 1.0  # without news a follower hears so often that the core is there


class HappeningLog:
    """One log for all followers, each with a cursor: a slow follower costs nothing, and is sent the state instead."""

    def __init__(self, limit: int, current: Callable[[], pb.Current]) -> None:
        self.number = 1 + secrets.randbits(62)  # not counted: after a backup came back, a count would come again
        self._current = current
        self._kept: deque[pb.Happening] = deque(maxlen=limit)
        self._sequence = 0
        self._changed = asyncio.Event()
        self.closed = False

    def append(self, happening: pb.Happening) -> None:
        """Adds one happening, gives it its position, and wakes every follower."""
        self._sequence += 1
        happening.log, happening.sequence = self.number, self._sequence
        self._kept.append(happening)
        self._wake()

    def close(self) -> None:
        """Says good-bye to every follower."""
        self.append(pb.Happening(shutting_down=pb.ShuttingDown()))
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, learner: str, log: int, sequence: int) -> AsyncGenerator[pb.Happening, None]:
        """Happenings after a position; the whole current state when the position is unknown or too old.

        When nothing happens, an empty one now and then: who follows learns how long silence may be.
        """
        cursor = sequence if log == self.number and sequence <= self._sequence else -1
        while True:
            changed = self._changed  # taken first: whatever is appended while a reader is busy wakes it
            oldest = self._sequence - len(self._kept)
            if cursor < oldest:
                cursor = self._sequence
                yield pb.Happening(log=self.number, sequence=cursor, current=self._current())
            while oldest <= cursor < self._sequence:
                happening = self._kept[cursor - self._sequence]
                cursor += 1
                if happening.WhichOneof("what") != "receipt" or happening.receipt.learner == learner:
                    yield happening
                oldest = self._sequence - len(self._kept)
            if cursor >= self._sequence:
                if self.closed:
                    return
                try:
                    async with asyncio.timeout(BEAT_S):
                        await changed.wait()
                except TimeoutError:
                    yield pb.Happening(log=self.number, sequence=cursor)
