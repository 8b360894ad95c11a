"""Reduces a process's memory: what its allocator keeps after a free, and library code that is no longer used."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h


def return_freed_memory() -> None:
    """Makes glibc's allocator return freed memory to the system; does nothing with other allocators.

    Only for processes that run nothing but Atoll. It limits arenas to two, since each keeps the most that it ever used.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for setting, value in ((M_ARENA_MAX, 2), (M_TRIM_THRESHOLD, 16 << 20), (M_MMAP_THRESHOLD, 4 << 20)):
            mallopt(setting, value)


def drop_code_pages(library: str) -> None:
    """Drops a library's code pages from memory, such as a compiler's after its use; the system reads them again on use.

    library: prefix of its file name. Only executable mappings are dropped, since no loader writes to them.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on Linux
        madvise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, rights, *_, path = line.split(maxsplit=5)
            if rights.startswith("r-x") and Path(path).name.startswith(library):
                first, end = (int(address, 16) for address in addresses.split("-"))
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
