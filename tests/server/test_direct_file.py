"""Large files are written past the page cache, with the same content as other files."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np
import psutil
import pytest
from atoll_server.storage import direct_file
from atoll_server.storage.direct_file import BLOCK_BYTES, BUFFER_BYTES, DirectFile
from atoll_server.storage.disk import DISK


@pytest.mark.parametrize(
    "sizes",
    [[0], [1], [BLOCK_BYTES], [BUFFER_BYTES], [BUFFER_BYTES - 1, 2], [3, 2 * BUFFER_BYTES + 5, 0, BLOCK_BYTES - 3]],
)
def test_a_large_file_has_exactly_the_written_bytes(tmp_path, sizes):
    path, random = tmp_path / "large", np.random.default_rng(0)
    path.write_bytes(b"an older file")
    parts = [random.bytes(size) for size in sizes]
    file = DISK.create_large(path)
    for part in parts:
        file.write(memoryview(part))
    file.sync()
    file.close()
    file.close()
    assert path.read_bytes() == b"".join(parts)


def test_a_large_file_reaches_the_disk_before_it_is_synced(tmp_path):
    file = DirectFile.create(tmp_path / "large")
    assert file is not None, "the folder of tests is on a file system without direct writes: set TMPDIR"
    before = psutil.Process().io_counters().write_bytes
    file.write(bytes(BUFFER_BYTES))
    assert psutil.Process().io_counters().write_bytes - before >= BUFFER_BYTES
    file.close()


def test_without_direct_writes_a_large_file_is_an_ordinary_one(tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "no direct writes")

    with monkeypatch.context() as patched:
        patched.setattr(direct_file.os, "open", refuse)
        assert DirectFile.create(tmp_path / "large") is None
    monkeypatch.setattr(DirectFile, "create", lambda _: None)
    file = DISK.create_large(tmp_path / "large")
    file.write(b"content")
    file.sync()
    file.close()
    assert (tmp_path / "large").read_bytes() == b"content"


def test_a_write_that_the_file_system_cannot_do_directly_goes_through_the_page_cache(tmp_path, monkeypatch):
    """Some file systems need larger blocks than ours, and say so only at the write."""
    refused, write = [], os.write

    def picky(descriptor: int, data: memoryview) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and len(data) % (2 * BLOCK_BYTES):
            refused.append(len(data))
            raise OSError(errno.EINVAL, "a direct write needs blocks of 8192 bytes")
        return write(descriptor, data)

    monkeypatch.setattr(direct_file.os, "write", picky)
    file, content = DISK.create_large(tmp_path / "large"), np.random.default_rng(0).bytes(BUFFER_BYTES + 5)
    file.write(content)
    file.sync()
    file.close()
    assert refused == [BLOCK_BYTES]
    assert (tmp_path / "large").read_bytes() == content


def test_an_error_of_the_disk_is_not_hidden(tmp_path):
    with pytest.raises(FileNotFoundError):
        DISK.create_large(tmp_path / "no folder" / "large")
    full = DirectFile(os.open("/dev/full", os.O_WRONLY), mmap.mmap(-1, BUFFER_BYTES))
    with pytest.raises(OSError, match="No space left"):
        full.write(bytes(BUFFER_BYTES))
    full.close()
