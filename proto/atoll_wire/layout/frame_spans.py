"""The part of a fragment's vector that a frame has, and the sizes that follow from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

BLOCK = 512  # parameters that share a scale


class Codec(IntEnum):
    """How values are encoded on the wire; the numbers are those of outer.proto."""

    FLOAT32 = 1
    INT8 = 2
    INT4 = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one piece in a frame. offset: in the vector of the fragment, or of a run of its frames."""

    piece: int
    offset: int
    length: int


@dataclass(frozen=True)
class FrameSpan:
    """The part of a vector in one frame: whole pieces, or a part of one.

    The vector is the fragment's, or that of a run of its frames. index: among the fragment's frames.
    """

    index: int
    offset: int
    length: int
    segments: tuple[Segment, ...]

    def moved(self, by: int) -> FrameSpan:
        """The same frame in a vector in which it lies so many values further on."""
        segments = tuple(Segment(each.piece, each.offset + by, each.length) for each in self.segments)
        return FrameSpan(self.index, self.offset + by, self.length, segments)

    @cached_property
    def place(self) -> slice:
        """Its slice of the vector."""
        return slice(self.offset, self.offset + self.length)

    @cached_property
    def lengths(self) -> array[int]:
        """Length of each segment, int64."""
        return array("q", (segment.length for segment in self.segments))

    @cached_property
    def blocks(self) -> int:
        """Number of blocks, each of which has a scale; a block ends with its segment."""
        return sum(-(-segment.length // BLOCK) for segment in self.segments)

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of its codes with two per byte; each segment begins a new byte."""
        return sum((segment.length + 1) // 2 for segment in self.segments)
