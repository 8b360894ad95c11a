"""Memory is reused, but never while a view of it exists."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest
from atoll_wire.codec import buffers
from atoll_wire.process import allocator

LLVM = "libllvmlite"
LENGTH = buffers.MIN_BYTES  # parameters, of four bytes each


@pytest.fixture(autouse=True)
def nothing_kept():
    gc.collect()  # now, vectors of earlier tests in this process release their memory
    buffers._free.clear()


def test_a_library_works_after_its_pages_were_dropped():
    def resident_bytes() -> int:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        rows = [next(line for line in lines if line.startswith("Rss:")) for at in lines if LLVM in at]
        return sum(int(row.split()[1]) << 10 for row in rows)

    double = numba.njit(lambda x: 2 * x)
    assert double(2) == 4
    before = resident_bytes()
    allocator.drop_library_pages(LLVM)
    assert resident_bytes() < before // 2
    assert double(2.5) == 5.0, "the code must be loaded again"


def test_a_library_works_in_a_forked_process_after_its_pages_were_dropped():
    """There, the system counts the pages that the loader changed as shared with the parent process."""
    double = numba.njit(lambda x: 2 * x)
    assert double(2) == 4
    if not (child := os.fork()):
        try:
            allocator.drop_library_pages(LLVM)
            right = double(2.5) == 5.0
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_vector_reuses_the_memory_of_a_deleted_one():
    first = buffers.empty(LENGTH)
    first.fill(7.0)
    place = first.ctypes.data
    del first
    second = buffers.empty(LENGTH - 5)  # nearly as long as the released one
    assert second.ctypes.data == place
    assert len(second) == LENGTH - 5
    assert second[3] == 7.0


def test_a_vector_reuses_a_slightly_larger_block_but_not_a_much_larger_one():
    first = buffers.empty(LENGTH)
    place = first.ctypes.data
    del first
    small = buffers.empty(LENGTH // 2)
    assert small.ctypes.data != place
    assert buffers.empty(LENGTH * 9 // 10).ctypes.data == place


@pytest.mark.parametrize(
    "look",
    [lambda v: v[5:9], lambda v: v[5:90][::3], lambda v: v.view(np.uint8).data, lambda v: v.reshape(2, -1)[1]],
)
def test_memory_with_a_view_is_not_reused(look):
    vector = buffers.empty(LENGTH)
    vector.fill(1.0)
    seen = look(vector)
    before = bytes(seen)
    place = vector.ctypes.data
    del vector
    other = buffers.empty(LENGTH)
    other.fill(2.0)
    assert other.ctypes.data != place
    assert bytes(seen) == before


def test_the_memory_of_a_burst_is_kept_and_the_system_may_take_it():
    vectors = [buffers.empty(LENGTH) for _ in range(7)]
    for vector in vectors:
        vector.fill(1.0)
    places = {vector.ctypes.data for vector in vectors}
    del vector, vectors
    gc.collect()
    assert [len(blocks) for blocks in buffers._free.values()] == [7]
    if sys.platform == "linux":
        assert lazily_freed_bytes() >= 7 * 4 * LENGTH
    again = [buffers.empty(LENGTH) for _ in range(7)]
    assert {vector.ctypes.data for vector in again} == places
    for vector in again:
        vector.fill(2.0)
    if sys.platform == "linux":
        assert lazily_freed_bytes() < 4 * LENGTH


def lazily_freed_bytes() -> int:
    """Returns the bytes of this process that the system may take without writing them anywhere."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("LazyFree:"))


def test_a_fork_has_its_own_memory():
    vector = buffers.empty(LENGTH)
    vector[0] = 1.0
    child = os.fork()
    if child == 0:
        vector[0] = 2.0
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert vector[0] == 1.0


def test_threads_never_share_a_vector():
    wrong: list[float] = []

    def work(number: int) -> None:
        for _ in range(50):
            vector = buffers.empty(LENGTH)
            vector[::4096] = number
            if not (vector[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_small_vectors_are_not_kept():
    assert buffers.empty(16).base is None
