"""Locks on files, which the kernel releases when their process ends."""

from __future__ import annotations

import fcntl
import os

_held = set["FileLock"]()


class FileLock:
    """A lock on an open file. It ends with this process, because forked children do not keep it."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: descriptor of a locked file. Use the function `locked` instead of this constructor."""
        self._descriptor = descriptor

    def share(self) -> None:
        """Turns an exclusive lock into a shared one. Raises BlockingIOError if another process locks the file first."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def write(self, content: bytes) -> None:
        """Replaces the file's content, which any process may read. Raises OSError."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, content, 0)
        os.fsync(self._descriptor)  # other machines read it over NFS

    def release(self) -> None:
        """Ends the lock. Repeated calls are allowed, and a call in a forked child has no effect."""
        if self not in _held:
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough while a child is being forked
        _held.discard(self)
        os.close(self._descriptor)


def locked(descriptor: int, *, shared: bool = False) -> FileLock:
    """Locks an open file without waiting. Closes the file if that fails.

    shared: whether other processes may share the lock. Raises BlockingIOError if another process holds a
    conflicting lock, and OSError if the file system does not support locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    lock = FileLock(descriptor)
    _held.add(lock)
    return lock


def _leave_to_parent() -> None:
    """Closes the child's copies of the parent's locked files, which would keep the locks after the parent's death."""
    for lock in _held:
        os.close(lock._descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
