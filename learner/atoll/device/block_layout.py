"""PURE: the positions of a run's values and bytes in the memory of a device.

On a device, each block of 512 values is a row of a matrix, so that one operation processes many blocks. The last block
of a segment may be shorter than its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from atoll_wire.codec.block_kernels import coded_bytes
from atoll_wire.layout.frame_spans import BLOCK

from atoll.fragments.segments import ALIGNED, I64, FragmentShape


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a `FrameRun`, which consists of consecutive frames of a fragment.

    lengths: int64 (blocks,), number of values in each block.
    segments: number of values in each segment, in the order of the run's vector.
    values: sizes that split the flat matrix, alternately, into a segment's values and the unused space after them.
    codes: sizes in bytes that split the flat matrix of codes in the same way.
    contents: sizes in bytes that split the contents of all frames into parts. A frame has one part for each segment's
    codes, one for its scales, and one for the unused space before the next frame.
    code_parts, scale_parts: the indices of the parts with codes, and of the parts with scales.
    scales: number of blocks in each frame.
    """

    lengths: I64
    segments: list[int]
    values: list[int]
    codes: list[int]
    contents: list[int]
    code_parts: list[int]
    scale_parts: list[int]
    scales: list[int]

    @property
    def blocks(self) -> int:
        """The number of rows of the matrix."""
        return len(self.lengths)

    @property
    def is_vector(self) -> bool:
        """Whether the flat matrix is the run's vector, because each segment consists of whole blocks."""
        return not any(self.values[1::2])

    @property
    def content_bytes(self) -> int:
        """The size of the contents of all frames."""
        return sum(self.contents)

    @classmethod
    def of(cls, shape: FragmentShape) -> BlockLayout:
        """Returns the layout of a run of this shape."""
        size, width = shape.rows[:, 1], coded_bytes(BLOCK, shape.levels)
        blocks = -(-size // BLOCK)
        first = np.cumsum(blocks) - blocks
        lengths = np.full(int(blocks.sum()), BLOCK, np.int64)
        lengths[first + blocks - 1] = size - BLOCK * (blocks - 1)
        coded = [coded_bytes(length, shape.levels) for length in size.tolist()]
        contents, code_parts, scale_parts, scales = list[int](), list[int](), list[int](), list[int]()
        frames = shape.rows[:, 2].tolist()
        for frame, segments in groupby(range(len(size)), key=frames.__getitem__):
            for segment in segments:
                code_parts.append(len(contents))
                contents.append(coded[segment])
            scales.append(int(blocks[shape.rows[:, 2] == frame].sum()))
            scale_parts.append(len(contents))
            contents += [2 * scales[-1] if shape.levels else 0, -shape.sizes[frame] % ALIGNED]
        assert np.array_equal(shape.rows[:, 0], np.cumsum(size) - size), "segments are consecutive"
        values, codes = _alternating(size, BLOCK * blocks), _alternating(np.array(coded, np.int64), width * blocks)
        return cls(lengths, size.tolist(), values, codes, contents, code_parts, scale_parts, scales)


def _alternating(used: I64, whole: I64) -> list[int]:
    sizes: list[int] = np.stack([used, whole - used], axis=1).ravel().tolist()
    return sizes
