"""Reduces a process's memory: returns memory that the allocator keeps, and drops the code pages of libraries."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # constants of malloc.h


def return_freed_memory() -> None:
    """Makes glibc's allocator return freed memory to the system. Does nothing with other allocators.

    Use this only in processes that run nothing but Atoll. It limits the arenas to two, because each arena keeps its
    peak memory.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for setting, value in ((M_ARENA_MAX, 2), (M_TRIM_THRESHOLD, 16 << 20), (M_MMAP_THRESHOLD, 4 << 20)):
            mallopt(setting, value)


def trim() -> None:
    """Returns memory that is free now to the system. Does nothing with other allocators than glibc's."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def drop_code_pages(library: str) -> None:
    """Drops a library's code pages from memory. The system reads a page again when its code runs.

    library: prefix of the file name. Only executable mappings are dropped, because no loader writes to them.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on Linux
        madvise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, rights, *_, path = line.split(maxsplit=5)
            if rights.startswith("r-x") and Path(path).name.startswith(library):
                first, end = (int(address, 16) for address in addresses.split("-"))
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
