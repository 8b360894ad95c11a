"""Reduces a process's memory: returns freed memory to the system, and drops pages of libraries that are seldom used."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from pathlib import Path

# A mapping of a file in /proc/self/smaps that the process may not write to, and whose pages are all as in the file
MAPPING = re.compile(
    r"^(?P<first>[0-9a-f]+)-(?P<end>[0-9a-f]+) r-.p \S+ \S+ [1-9]\d* +(?P<path>/.*)\n"
    r"(?:[A-Z]\w+:.*\n)*?Anonymous: +0 kB\n(?:[A-Z]\w+:.*\n)*?Swap: +0 kB\n",
    re.MULTILINE,
)
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


def drop_library_pages(library: str) -> None:
    """Drops a library's code and constants from memory. The system reads a page again when it is used.

    library: prefix of the file name. Only mappings that nothing has changed are dropped, because changes would be lost.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on Linux
        madvise = ctypes.CDLL(None).madvise
        for mapping in MAPPING.finditer(Path("/proc/self/smaps").read_text()):
            if Path(mapping["path"]).name.startswith(library):
                first, end = int(mapping["first"], 16), int(mapping["end"], 16)
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)
