"""What a process's allocator keeps, and what of its code stays in memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h


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
