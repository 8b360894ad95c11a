"""Payload files of acknowledged contributions, and the room for them. `payload_writer` writes them while they grow.

A file is named by its key.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Container, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import crc32c
from atoll_wire.codec.frame_codec import Content, FrameError
from atoll_wire.errors import UserError
from atoll_wire.layout.frame_spans import Codec, FrameSpan
from numpy.typing import NDArray

from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk, ReadableFile

RECORD = struct.Struct("<IIIxxxx")  # before each payload: frame, length, CRC-32C


class SpoolError(UserError):
    """A payload file is missing or damaged; one line with the remedy."""


class SpoolFull(RuntimeError):  # noqa: N818 - a state, answered with RESOURCE_EXHAUSTED
    """No room for another reservation now."""


class ContentCache:
    """Decompressed contents that wait for their merge in memory, as many as it may take: the others are read again."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._lock = threading.Lock()

    def keep(self, content: Content, among: dict[int, Content], frame: int) -> None:
        """Adds it to a contribution's, if there is room."""
        with self._lock:
            if content.nbytes <= self._left:
                self._left -= content.nbytes
                among[frame] = content

    def let_go(self, among: dict[int, Content]) -> None:
        """Drops all of a contribution's."""
        with self._lock:
            self._left += sum(content.nbytes for content in among.values())
            among.clear()


@dataclass(slots=True)
class StoredPayload:
    """A whole contribution on disk, as the merge reads it. contents: those of its frames that are still in memory."""

    learner: str
    codec: Codec
    norms_sq: NDArray[np.float64]
    scale: float  # what it is clipped by
    path: Path
    places: dict[int, tuple[int, int, int]]  # frame -> offset, length, crc32c
    disk: Disk
    kept: ContentCache
    contents: dict[int, Content] = field(default_factory=dict)
    _file: ReadableFile | None = None

    def content(self, span: FrameSpan) -> Content:
        """One frame's, decompressed. Raises SpoolError."""
        found = self.contents.get(span.index)
        if found is not None:
            return found
        try:
            return frame_codec.decompress(self.payload(span.index), span, self.codec)
        except FrameError as error:
            raise SpoolError(f"{self.path}: frame {span.index} {error}: the disk lost acknowledged data") from error

    def payload(self, frame: int) -> bytes:
        """One frame's payload, checked again: what the disk gives back is not taken on trust."""
        if self._file is None:
            self._file = self.disk.open(self.path)
        if frame not in self.places:
            raise SpoolError(f"{self.path}: frame {frame} is not there: the disk lost acknowledged data")
        offset, length, crc = self.places[frame]
        data = self._file.read_at(offset, length)
        if crc32c(data) != crc:
            raise SpoolError(f"{self.path}: frame {frame} does not match its checksum: the disk lost acknowledged data")
        return data

    def close(self) -> None:
        """Lets go of the file, and of what is in memory."""
        self.kept.let_go(self.contents)
        if self._file is not None:
            self._file.close()
            self._file = None


class Spool:
    """The directory of payload files and the room that is left in it."""

    def __init__(self, directory: Path, limit_bytes: int, kept_bytes: int, disk: Disk = DISK) -> None:
        """kept_bytes: of decompressed contents in memory."""
        self.directory = directory
        self.disk = disk
        self.limit_bytes = limit_bytes
        self.kept = ContentCache(kept_bytes)
        self.used_bytes = 0
        self.room_bytes: int | None = None  # that the disk has beyond what is kept free; None: not looked at yet
        self._room = threading.Lock()  # room is taken on the event loop and given back by workers

    def reserve(self, size_bytes: int) -> None:
        """Takes room for a contribution before its first frame. SpoolFull when there is none."""
        with self._room:
            if self.used_bytes + size_bytes > self.limit_bytes:
                raise SpoolFull(f"the spool holds {self.used_bytes} of {self.limit_bytes} bytes: try again later")
            if self.room_bytes is not None:
                if size_bytes > self.room_bytes:
                    raise SpoolFull("the core's disk is nearly full: make room there; senders wait until there is")
                self.room_bytes -= size_bytes
            self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Gives room back."""
        with self._room:
            self.used_bytes -= size_bytes
            assert self.used_bytes >= 0, "more room was given back than was taken"

    def path(self, generation: int, key: ContributionKey) -> Path:
        """Where a contribution's payload lies."""
        name = f"{key.learner}-{key.incarnation}-{key.seq}.frames"
        return self.directory / f"g{generation}" / f"f{key.fragment:04d}" / name

    def prepare(self, generation: int, fragments: Iterable[int]) -> None:
        """Makes the directories durably, so that a payload's rename is all that its own durability needs."""
        for fragment in fragments:
            self.disk.make_directory(self.path(generation, ContributionKey("", 0, fragment, 0)).parent)
        for directory in (self.directory / f"g{generation}", self.directory, self.directory.parent):
            self.disk.sync_directory(directory)

    def open(
        self, generation: int, key: ContributionKey, codec_used: Codec, norms_sq: NDArray[np.float64], scale: float
    ) -> StoredPayload:
        """Reads the table of a whole file. SpoolError when it is missing or cut."""
        path = self.path(generation, key)
        places: dict[int, tuple[int, int, int]] = {}
        try:
            with closing(self.disk.open(path)) as file:
                size, offset = file.size, 0
                while offset < size:
                    index, length, crc = RECORD.unpack(file.read_at(offset, RECORD.size))
                    offset += RECORD.size
                    places[index] = (offset, length, crc)
                    offset += length
        except (OSError, struct.error) as error:
            raise SpoolError(
                f"{path} cannot be read ({error}): an acknowledged contribution is gone; restore a backup"
            ) from error
        if offset != size:
            raise SpoolError(f"{path} is cut: an acknowledged contribution is gone; restore a backup")
        return StoredPayload(key.learner, codec_used, norms_sq, scale, path, places, self.disk, self.kept)

    def delete(self, generation: int, key: ContributionKey, size_bytes: int) -> None:
        """Removes a payload that nothing needs any more; gives its room back if it was still there."""
        if self.disk.remove(self.path(generation, key)):
            self.release(size_bytes)
            crash_points.point("spool.removed")

    def older(self, generation: int) -> list[Path]:
        """Payloads of other generations than this one, and what is left of their uploads."""
        newest = self.directory / f"g{generation}"
        return [path for path in self.disk.files(self.directory) if not path.is_relative_to(newest)]

    def delete_older(self, generation: int) -> None:
        """Removes all of them; they take no room by now."""
        for path in self.older(generation):
            self.disk.remove(path)

    def sweep(self, needed: Container[Path]) -> int:
        """At start: deletes every other file. Returns how many they were."""
        superfluous = [path for path in self.disk.files(self.directory) if path not in needed]
        for path in superfluous:
            self.disk.remove(path)
        return len(superfluous)
