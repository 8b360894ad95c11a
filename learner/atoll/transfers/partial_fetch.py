"""PURE: keeps the received frames of a fetch when the link fails.

A merge may change a fragment between two attempts to fetch the whole fragment. Frames that arrived earlier are then
outdated. The learner applies published updates to them, which needs 0.4 bytes per parameter instead of 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from atoll_wire import outer_pb2 as pb
from atoll_wire.codec import buffers, frame_codec
from atoll_wire.codec.block_kernels import F32
from atoll_wire.codec.checksums import Payload
from atoll_wire.codec.frame_codec import Content, FrameError
from atoll_wire.layout.frame_spans import Codec, FrameSpan
from atoll_wire.layout.layout import FrameRun
from atoll_wire.messages.frame_messages import WireFrame

from atoll.fragments.segments import Coded

MAX_UPDATES = 8  # more updates would be larger than the frames themselves


class UnsoundError(Exception):
    """The server sent data that was not requested."""


class FrameRequest(NamedTuple):
    """A request for frames of the update that leads to `version`, or of the whole fragment (version 0)."""

    version: int
    frames: Sequence[int]


@dataclass(slots=True)
class _Part:
    """One frame. payload: empty until it arrives. version: the frame's version after all `updates`.

    updates: payloads of updates to add to the frame's values, oldest first.
    """

    payload: Payload = b""
    version: int = 0
    updates: list[Payload] = field(default_factory=list)


class Decoded(NamedTuple):
    """The values of a fetch.

    values: float32 (run.length,), in new memory. checksum: their CRC-32C. The header's checksum covers the whole
    fragment, not only this run: see `checksums.joined`.
    update: the coded values of the update, or None for a fetch of the whole fragment.
    """

    values: F32
    checksum: int
    update: Coded | None


class PartialFetch:
    """The frames that one fetch has received, either of a published update or of a whole fragment."""

    def __init__(self, run: FrameRun, update_codec: Codec, version: int) -> None:
        """version: the version that the update leads to; 0 to fetch the whole fragment at its current version."""
        self.version = version
        self.header = pb.FetchHeader()
        self.size_bytes = 0  # total of the payloads that have arrived
        self._run = run
        self._update_codec = update_codec
        self._codec = update_codec if version else Codec.FLOAT32
        self._parts = {span.index: _Part() for span in run.frames}
        self._floor = 0  # lowest version that is accepted for a requested frame

    def next(self, target: int) -> FrameRequest | None:
        """Returns the next request, or None when all frames have one version. target: the newest announced version.

        Updates for received frames come first, because the core keeps only a few updates. A frame that is too old for
        them is fetched again.
        """
        missing = [index for index, part in self._parts.items() if not part.payload]
        if not self.version:
            newest = max(self.header.version, target) if missing else self.header.version
            here = {index: part.version for index, part in self._parts.items() if part.payload}
            self.forget([index for index, version in here.items() if newest - version > MAX_UPDATES])
            behind = {index: version for index, version in here.items() if 0 < newest - version <= MAX_UPDATES}
            if behind:
                oldest = min(behind.values())
                return FrameRequest(oldest + 1, [index for index, version in behind.items() if version == oldest])
            missing = [index for index, part in self._parts.items() if not part.payload]
        self._floor = max(part.version for part in self._parts.values())
        return FrameRequest(self.version, missing) if missing else None

    def took(self, header: pb.FetchHeader, frame: WireFrame | pb.Frame) -> None:
        """Stores a frame of the fetch. Raises UnsoundError if the frame was not requested."""
        fits = self.version in {0, header.version} and header.version >= self._floor
        if not (fits and int(header.codec) == self._codec and frame.payload):
            raise UnsoundError
        if header.version >= self.header.version:
            self.header = header
        self._parts[frame.index] = _Part(frame.payload, header.version)
        self.size_bytes += len(frame.payload)

    def took_update(self, header: pb.FetchHeader, frame: WireFrame | pb.Frame) -> None:
        """Stores a frame of the update that an older frame needs next. Raises UnsoundError for another update."""
        part = self._parts[frame.index]
        if int(header.codec) != self._update_codec or header.version != part.version + 1:
            raise UnsoundError
        part.updates.append(frame.payload)
        part.version = header.version
        self.size_bytes += len(frame.payload)

    def forget(self, frames: Sequence[int]) -> None:
        """Drops frames, for example because the core no longer keeps their updates. They are then fetched again."""
        for index in frames:
            self._parts[index] = _Part()

    def decoded(self, base: F32 | None) -> Decoded | None:
        """Returns the values at the header's version, or None if a frame is invalid.

        base: float32 (run.length,), the values to which the update is added; None for a fetch of the whole fragment.
        """
        out, checksum, contents = buffers.empty(self._run.length), 0, list[Content]()
        try:
            for span in self._run.frames:
                part = self._parts[span.index]
                if base is None:
                    self._decode(span, part, out)
                else:
                    contents.append(frame_codec.decompress(part.payload, span, self._codec))
                    frame_codec.content_advance(contents[-1], span, self._codec, base, out)
                checksum = frame_codec.vector_crc32c(out[span.place], checksum)
        except FrameError:
            return None
        return Decoded(out, checksum, None if base is None else Coded.of(contents))

    def _decode(self, span: FrameSpan, part: _Part, out: F32) -> None:
        frame_codec.decode_frame(part.payload, span, self._codec, out)
        for update in part.updates:
            frame_codec.decode_add(update, span, self._update_codec, np.ones(len(span.segments), np.float32), out)
