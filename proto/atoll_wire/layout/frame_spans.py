"""The part of a fragment's vector that a frame holds, and the sizes that follow from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

BLOCK = 512  # parameters that share a scale


class Codec(IntEnum):
    """The encoding of values on the wire. The numbers are those of outer.proto."""

    FLOAT32 = 1
    INT8 = 2
    INT4 = 3


class Compression(IntEnum):
    """Which payloads are compressed. The numbers are those of outer.proto. AUTO: those that cross slow links."""

    AUTO = 1
    ALWAYS = 2
    NEVER = 3

    @classmethod
    def of(cls, number: int) -> Compression:
        """Returns the value with this number, or AUTO for an unknown number."""
        return next((each for each in cls if each == number), cls.AUTO)

    def applies(self, *, fast: bool) -> bool:
        """Returns whether a payload is compressed. fast: whether its link carries more than a compressor saves."""
        return self is Compression.ALWAYS or (self is Compression.AUTO and not fast)


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one piece in one frame. offset: position in the vector of the fragment or of the frame run."""

    piece: int
    offset: int
    length: int


@dataclass(frozen=True)
class FrameSpan:
    """The part of a vector in one frame: whole pieces, or a part of one piece.

    The vector belongs to the fragment or to a frame run. index: the frame's number within the fragment.
    """

    index: int
    offset: int
    length: int
    segments: tuple[Segment, ...]

    def moved(self, by: int) -> FrameSpan:
        """Returns the same frame, moved `by` values towards the end of the vector."""
        segments = tuple(Segment(each.piece, each.offset + by, each.length) for each in self.segments)
        return FrameSpan(self.index, self.offset + by, self.length, segments)

    @cached_property
    def place(self) -> slice:
        """The frame's slice of the vector."""
        return slice(self.offset, self.offset + self.length)

    @cached_property
    def lengths(self) -> array[int]:
        """The length of each segment, int64."""
        return array("q", (segment.length for segment in self.segments))

    @cached_property
    def blocks(self) -> int:
        """The number of blocks. Each block has its own scale and belongs to a single segment."""
        return sum(-(-segment.length // BLOCK) for segment in self.segments)

    @cached_property
    def packed_bytes(self) -> int:
        """The size of the frame's codes in bytes, with two codes per byte. Each segment begins a new byte."""
        return sum((segment.length + 1) // 2 for segment in self.segments)
