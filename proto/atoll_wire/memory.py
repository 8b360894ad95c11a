"""Large float32 vectors whose memory is used again: a fresh page costs as much as two passes over it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES = 1 << 20  # below it the allocator does the same
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
MOST_KEPT, MOST_KEPT_BYTES = 4, 256 << 20  # of one size that wait to be used again; one block at least

_free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)


def empty(length: int) -> NDArray[np.float32]:
    """As `np.empty(length, np.float32)`. Its memory goes to the next vector of that size when nothing views it."""
    size = 4 * length
    if size < LEAST_BYTES:
        return np.empty(length, np.float32)
    size = _rounded(size)
    try:
        block = _free[size].pop()
    except IndexError:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)  # a fork must not share it
        with contextlib.suppress(AttributeError, OSError):  # a hint that not every system takes
            block.madvise(mmap.MADV_HUGEPAGE)
    vector = np.frombuffer(block, np.float32, length)
    weakref.finalize(vector, _give_back, size, block).atexit = False  # each view on it keeps the vector itself
    return vector


def lean() -> None:
    """Has this process's allocator, if it is glibc's, keep little of what was freed: for a process that is all Atoll's.

    Threads get no arenas of their own, each of which would keep what it once needed.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for setting, value in ((M_ARENA_MAX, 2), (M_TRIM_THRESHOLD, 16 << 20), (M_MMAP_THRESHOLD, 4 << 20)):
            mallopt(setting, value)


def let_go_of_code(library: str) -> None:
    """Takes a library's code out of this process's memory; what is used again is read again. For a compiler's, after.

    library: how the name of its file begins. Only what can be executed: no loader writes there.
    """
    with contextlib.suppress(AttributeError, OSError):  # another system than Linux
        madvise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, rights, *_, path = line.split(maxsplit=5)
            if rights.startswith("r-x") and Path(path).name.startswith(library):
                first, end = (int(address, 16) for address in addresses.split("-"))
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def _give_back(size: int, block: mmap.mmap) -> None:
    if len(_free[size]) < max(1, min(MOST_KEPT, MOST_KEPT_BYTES // size)):
        _free[size].append(block)


def _rounded(size: int) -> int:
    """Up to one of eight sizes between two powers of two: fragments are nearly equal."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
