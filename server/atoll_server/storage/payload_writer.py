"""Writes one contribution's payload to a file during its upload. Frames are checked and written as they arrive.

An unfinished file's name ends in `.part`. A complete file is fsynced and renamed to `.frames`, and its directory is
fsynced. The file consists of records, each with an index, a length, a CRC-32C checksum and a payload. An interrupted
upload can continue with the missing frames. Repeated frames have no effect.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import frame_codec
from atoll_wire.codec.checksums import Payload, crc32c
from atoll_wire.codec.frame_codec import Content, FrameError, NotFiniteError
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FragmentLayout
from atoll_wire.messages.frame_messages import WireFrame
from numpy.typing import NDArray

from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk, WritableFile
from atoll_server.storage.spool import RECORD, ContentCache, StoredPayload


class ChecksumError(ValueError):
    """A frame was corrupted in transit. The sender should send it again."""


_numbers = itertools.count(1)


@dataclass(slots=True)
class PayloadWriter:
    """Writes one payload. Several worker threads may write at the same time.

    The event loop reads `received` and byte counts without a lock.
    """

    key: ContributionKey
    fragment: FragmentLayout
    codec: Codec
    size_bytes: int  # declared total size of the payloads
    digest: bytes  # declared digest (see `frame_codec.frames_digest`)
    final: Path  # path of the complete file
    kept: ContentCache
    disk: Disk = DISK
    received: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # by frame: offset, length, crc32c
    squares: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # by frame: each segment's sum of squares
    received_bytes: int = 0  # payload bytes received so far
    path: Path = field(init=False)  # path of the unfinished file; unique, since an upload with this key may restart
    _contents: dict[int, Content] = field(default_factory=dict)  # by frame, for the frames whose contents fit in memory
    _written_bytes: int = 0
    _file: WritableFile | None = None
    _closed: bool = False  # whether writing has ended
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.path = self.final.with_name(f"{self.final.name}.{next(_numbers)}.part")

    @property
    def frames(self) -> int:
        """The number of frames in a complete contribution to this fragment."""
        return len(self.fragment.frames)

    def write(self, frames: Sequence[pb.Frame | WireFrame]) -> bool:
        """Checks frames and writes the new ones. Returns whether any frame was new. Runs in a worker thread.

        If it raises, it has written none of them. Raises ChecksumError for a frame that should be sent again. Raises
        FrameError for a frame that is invalid in this run (NotFiniteError if its values are not finite). Raises OSError
        if the write fails.
        """
        checked = {frame.index: (frame, *self._checked(frame)) for frame in frames}
        with self._lock:
            new = [each for index, each in checked.items() if index not in self.received]
            if self._closed or not new:
                return False
            self._append([frame for frame, _, _ in new])
            for frame, content, squares in new:
                self.squares[frame.index] = squares
                self.kept.keep(content, self._contents, frame.index)
        return True

    def _checked(self, frame: pb.Frame | WireFrame) -> tuple[Content, NDArray[np.float64]]:
        """Returns a frame's decompressed content, and each segment's sum of squares. See `write` for the errors."""
        if crc32c(frame.payload) != frame.crc32c:
            raise ChecksumError(f"frame {frame.index} of {self.key} does not match its checksum: send it again")
        try:
            return frame_codec.check_frame(frame.payload, self.fragment.frames[frame.index], self.codec)
        except NotFiniteError as error:
            raise NotFiniteError(f"frame {frame.index} {error}") from error
        except FrameError as error:
            raise FrameError(
                f"frame {frame.index} of {self.key} {error}: use the same version of Atoll on both sides"
            ) from error

    def _append(self, frames: Sequence[pb.Frame | WireFrame]) -> None:
        """Appends new frames to the file, in one write."""
        records, places, end = list[Payload](), dict[int, tuple[int, int, int]](), self._written_bytes
        for frame in frames:
            records += (RECORD.pack(frame.index, len(frame.payload), frame.crc32c), frame.payload)
            places[frame.index] = (end + RECORD.size, len(frame.payload), frame.crc32c)
            end += RECORD.size + len(frame.payload)
        size_bytes = self.received_bytes + sum(length for _, length, _ in places.values())
        if size_bytes > self.size_bytes:
            raise FrameError(
                f"contribution {self.key} sends more than its declared {self.size_bytes} bytes: "
                "send it again with a new seq"
            )
        if self._file is None:
            self._file = self.disk.create(self.path)
        try:
            self._file.write(*records)
        except OSError:
            self._closed = True  # the offset of the next record is unknown
            raise
        crash_points.point("spool.frame written")
        self._written_bytes, self.received_bytes = end, size_bytes
        self.received.update(places)  # `complete` reads it without the lock

    @property
    def complete(self) -> bool:
        return len(self.received) == self.frames

    def check(self) -> None:
        """Raises FrameError if the complete file differs from its declared size or digest."""
        table = [self.received[index][1:] for index in range(self.frames)]
        if self.received_bytes != self.size_bytes or frame_codec.frames_digest(table) != self.digest:
            raise FrameError(
                f"the frames of contribution {self.key} differ from the size or digest in its header: "
                "send it again with a new seq"
            )

    def finish(self, norms_sq: NDArray[np.float64], scale: float) -> StoredPayload:
        """Makes the file durable under its final name. Runs in a worker thread.

        norms_sq: squared norm of each piece, float64 (pieces,). scale: factor that clips the contribution, from 0 to 1.
        """
        with self._lock:
            assert self._file is not None, "a contribution has at least one frame"
            self._file.sync()
            crash_points.point("spool.synced")
            self._file.close()
            self.disk.rename(self.path, self.final)
            crash_points.point("spool.renamed")
            self.disk.sync_directory(self.final.parent)
            crash_points.point("spool.directory synced")
            contents, self._contents = self._contents, {}
            if len(contents) == self.frames:
                self.disk.forget(self.final)  # the merge does not read the file
            return StoredPayload(
                self.key.learner, self.codec, norms_sq, scale, self.final, self.received, self.disk, self.kept, contents
            )

    def discard(self) -> None:
        """Deletes the file. Runs in a worker thread."""
        with self._lock:
            self._closed = True
            self.kept.let_go(self._contents)
            if self._file is not None:
                self._file.close()
            self.disk.remove(self.path)
