"""Reuses the memory of large float32 vectors.

The first write to a new page costs as much as two passes over a page in use. Free memory stays mapped, but the system
may take its pages when it needs memory.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

MIN_BYTES = 1 << 20  # the allocator already reuses the memory of smaller vectors
WASTE = 1.25  # a vector may use a block that is larger by this factor

_free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)


def empty(length: int) -> NDArray[np.float32]:
    """Returns an uninitialised float32 vector of shape (length,).

    Later vectors may reuse the memory once neither this vector nor a view of it exists.
    """
    size = 4 * length
    if size < MIN_BYTES:
        return np.empty(length, np.float32)
    block = _block(_rounded(size))
    vector = np.frombuffer(block, np.float32, length)
    weakref.finalize(vector, _give_back, block).atexit = False  # each view keeps the vector alive
    return vector


def _block(size: int) -> mmap.mmap:
    """Returns memory of at least this size: the smallest free block that fits well, or else new memory."""
    for kept in sorted(kept for kept in tuple(_free) if size <= kept <= WASTE * size):
        with contextlib.suppress(IndexError):
            return _free[kept].pop()
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)  # a forked child must not share the memory
    with contextlib.suppress(AttributeError, OSError):  # some systems do not accept this hint
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _give_back(block: mmap.mmap) -> None:
    with contextlib.suppress(AttributeError, OSError):
        block.madvise(mmap.MADV_FREE)
    _free[len(block)].append(block)


def _rounded(size: int) -> int:
    """Rounds up to one of eight sizes between two powers of two, so that fragments of similar size share blocks."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
