"""File locks end with the process that took them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from atoll_wire.process.file_lock import locked


def opened(path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR)


def test_one_exclusive_lock_or_several_shared_ones(tmp_path):
    path = tmp_path / "lock"
    first = locked(opened(path))
    for shared in (False, True):
        with pytest.raises(BlockingIOError):
            locked(opened(path), shared=shared)
    first.share()
    second = locked(opened(path), shared=True)
    with pytest.raises(BlockingIOError):
        locked(opened(path))
    first.release()
    first.release()
    second.release()
    locked(opened(path)).release()


def test_a_forked_child_neither_keeps_the_lock_nor_ends_it(tmp_path):
    path = tmp_path / "lock"
    lock = locked(opened(path))
    ready, leave = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        lock.release()  # as a copied object may do
        os.write(ready[1], b".")
        os.read(leave[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(BlockingIOError):
            locked(opened(path))
        os.close(lock._descriptor)  # as the kernel does when the process is killed
        lock._descriptor = -1
        locked(opened(path)).release()
    finally:
        os.write(leave[1], b".")
        os.waitpid(child, 0)
        for each in (*ready, *leave):
            os.close(each)


def test_a_lock_that_is_refused_leaves_no_file_open(tmp_path):
    path = tmp_path / "lock"
    first = locked(opened(path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(BlockingIOError):
            locked(opened(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    first.release()
