"""What a frame holds of a fragment's vector, and the sizes that follow from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

BLOCK = 512  # parameters that share a scale


class Codec(IntEnum):
    """How values travel; the numbers are those of the contract."""

    FLOAT32 = 1
    INT8 = 2
    INT4 = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one piece that a frame holds. offset: in the fragment's vector."""

    piece: int
    offset: int
    length: int


@dataclass(frozen=True)
class FrameSpan:
    """The part of a fragment's vector that a frame holds: whole pieces, or a part of one."""

    index: int
    offset: int
    length: int
    segments: tuple[Segment, ...]

    @cached_property
    def place(self) -> slice:
        """Where it lies in the fragment's vector."""
        return slice(self.offset, self.offset + self.length)

    @cached_property
    def lengths(self) -> array[int]:
        """Of each segment, as int64."""
        return array("q", (segment.length for segment in self.segments))

    @cached_property
    def blocks(self) -> int:
        """Blocks that are quantised together; none reaches over the end of a segment."""
        return sum(-(-segment.length // BLOCK) for segment in self.segments)

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of its codes at two a byte; each segment begins a byte."""
        return sum((segment.length + 1) // 2 for segment in self.segments)
