"""Manages the payload files of acknowledged contributions and the disk space for them.

A file's path consists of the generation and the contribution's key. `payload_writer` writes the files.
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

RECORD = struct.Struct("<IIIxxxx")  # header before each payload: frame, length, CRC-32C


class SpoolError(UserError):
    """A payload file is missing or damaged. The message is one line with the fix."""


class SpoolFull(RuntimeError):  # noqa: N818 - a state, reported as RESOURCE_EXHAUSTED
    """The spool currently has no space for this reservation."""


class ContentCache:
    """Limits the memory for decompressed frames that wait for their merge. Merges read other frames from disk."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self._lock = threading.Lock()

    def keep(self, content: Content, among: dict[int, Content], frame: int) -> None:
        """Adds a frame's content to `among`, the contents of its contribution, unless the limit is reached."""
        with self._lock:
            if content.nbytes <= self._left:
                self._left -= content.nbytes
                among[frame] = content

    def let_go(self, among: dict[int, Content]) -> None:
        """Drops the contents of one contribution from memory."""
        with self._lock:
            self._left += sum(content.nbytes for content in among.values())
            among.clear()


@dataclass(slots=True)
class StoredPayload:
    """A complete contribution on the disk, which a merge reads. contents: decompressed frames that are in memory."""

    learner: str
    codec: Codec
    norms_sq: NDArray[np.float64]
    scale: float  # factor that clips the contribution, from 0 to 1
    path: Path
    places: dict[int, tuple[int, int, int]]  # by frame: offset, length, crc32c
    disk: Disk
    kept: ContentCache
    contents: dict[int, Content] = field(default_factory=dict)
    _file: ReadableFile | None = None

    def content(self, span: FrameSpan) -> Content:
        """Returns the decompressed content of one frame. Raises SpoolError if the frame is damaged."""
        found = self.contents.get(span.index)
        if found is not None:
            return found
        try:
            return frame_codec.decompress(self.payload(span.index), span, self.codec)
        except FrameError as error:
            raise SpoolError(
                f"{self.path}: frame {span.index} {error}: the disk lost acknowledged data; restore a backup"
            ) from error

    def payload(self, frame: int) -> bytes:
        """Returns one frame's payload from the disk. Raises SpoolError if the frame is missing or damaged."""
        if self._file is None:
            self._file = self.disk.open(self.path)
        if frame not in self.places:
            raise SpoolError(
                f"{self.path}: frame {frame} is missing: the disk lost acknowledged data; restore a backup"
            )
        offset, length, crc = self.places[frame]
        data = self._file.read_at(offset, length)
        if crc32c(data) != crc:
            raise SpoolError(
                f"{self.path}: frame {frame} does not match its checksum: the disk lost acknowledged data; "
                "restore a backup"
            )
        return data

    def check(self, frames: int, digest: bytes) -> None:
        """Reads all frames, then closes the file. frames: number of frames. digest: the declared digest.

        Raises SpoolError if a frame is missing or damaged or the file belongs to another contribution.
        """
        with closing(self):
            for frame in range(frames):
                self.payload(frame)
            if frame_codec.frames_digest([self.places[frame][1:] for frame in range(frames)]) != digest:
                raise SpoolError(f"{self.path} does not hold the contribution in the ledger: restore a backup")

    def leave_to_disk(self) -> None:
        """Drops the payload from memory, including the system's, after its merge. Only a restart reads it again.

        Otherwise, the files that wait for a snapshot would fill the system's memory. On some virtual machines, writing
        to new memory takes ten times as long as writing to memory that was just freed.
        """
        if self._file is not None:
            self._file.forget()
        self.close()

    def close(self) -> None:
        """Closes the file and drops the contents in memory."""
        self.kept.let_go(self.contents)
        if self._file is not None:
            self._file.close()
            self._file = None


class Spool:
    """The directory of payload files and the space left in it."""

    def __init__(self, directory: Path, limit_bytes: int, kept_bytes: int, disk: Disk = DISK) -> None:
        """limit_bytes: limit on the payloads on the disk. kept_bytes: limit on the decompressed contents in memory."""
        self.directory = directory
        self.disk = disk
        self.limit_bytes = limit_bytes
        self.kept = ContentCache(kept_bytes)
        self.used_bytes = 0
        self.room_bytes: int | None = None  # disk space that payloads may still use; None until measured
        self._room = threading.Lock()  # needed since the event loop reserves space and worker threads release it

    def reserve(self, size_bytes: int) -> None:
        """Reserves space for a contribution before its first frame. Raises SpoolFull if there is no space."""
        with self._room:
            if self.used_bytes + size_bytes > self.limit_bytes:
                raise SpoolFull(
                    f"the spool has no space for {size_bytes} bytes ({self.used_bytes} of {self.limit_bytes} bytes are "
                    "used): try again later, or raise --limit-spool-bytes"
                )
            if self.room_bytes is not None:
                if size_bytes > self.room_bytes:
                    raise SpoolFull("the core's disk is nearly full: free space there; senders wait until then")
                self.room_bytes -= size_bytes
            self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Frees space that was reserved."""
        with self._room:
            self.used_bytes -= size_bytes
            assert self.used_bytes >= 0, "more space was released than reserved"

    def path(self, generation: int, key: ContributionKey) -> Path:
        name = f"{key.learner}-{key.incarnation}-{key.seq}.frames"
        return self.directory / f"g{generation}" / f"f{key.fragment:04d}" / name

    def prepare(self, generation: int, fragments: Iterable[int]) -> None:
        """Creates the payloads' directories and makes them durable, so that a later write syncs only its directory."""
        self.disk.make_directory(self.directory / f"g{generation}")
        for fragment in fragments:
            self.disk.make_directory(self.path(generation, ContributionKey("", 0, fragment, 0)).parent)
        for directory in (self.directory / f"g{generation}", self.directory, self.directory.parent):
            self.disk.sync_directory(directory)

    def open(
        self, generation: int, key: ContributionKey, codec_used: Codec, norms_sq: NDArray[np.float64], scale: float
    ) -> StoredPayload:
        """Reads the frame headers of a complete file. Raises SpoolError if the file is missing or truncated."""
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
                f"{path} cannot be read ({error}): an acknowledged contribution is lost; restore a backup"
            ) from error
        if offset != size:
            raise SpoolError(f"{path} is truncated: an acknowledged contribution is lost; restore a backup")
        return StoredPayload(key.learner, codec_used, norms_sq, scale, path, places, self.disk, self.kept)

    def delete(self, generation: int, key: ContributionKey, size_bytes: int) -> None:
        """Removes a payload that is no longer needed. Returns its space to the spool if the file existed."""
        if self.disk.remove(self.path(generation, key)):
            self.release(size_bytes)
            crash_points.point("spool.removed")

    def older(self, generation: int) -> list[Path]:
        """Returns the payloads and unfinished uploads of all other generations."""
        newest = self.directory / f"g{generation}"
        return [path for path in self.disk.files(self.directory) if not path.is_relative_to(newest)]

    def delete_older(self, generation: int) -> None:
        """Removes the files that `older` returns.

        They do not count against the limit, so `used_bytes` does not change.
        """
        for path in self.older(generation):
            self.disk.remove(path)

    def sweep(self, needed: Container[Path]) -> int:
        """Deletes every file that is not in `needed`.

        Called when a core starts. Returns the number of deleted files.
        """
        superfluous = [path for path in self.disk.files(self.directory) if path not in needed]
        for path in superfluous:
            self.disk.remove(path)
        return len(superfluous)
