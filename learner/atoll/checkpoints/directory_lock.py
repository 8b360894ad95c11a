"""The lock on a learner's folder of checkpoints: only one learner at a time can use the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from pathlib import Path

import structlog
from atoll_wire.process.clock import Clock
from atoll_wire.process.file_lock import FileLock, locked

from atoll.errors import LearnerError

log = structlog.get_logger()

LOCK = "lock"  # name of the file, which is never deleted: otherwise, two learners could lock two files of this name
WAIT_S = 10.0  # a restarted job may begin before the old processes have ended
RETRY_S = 0.1
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
USER = re.compile(r"process \d+ on \S+")
MAX_USER_BYTES = 512


class DirectoryLock:
    """The lock on a folder that all ranks of one learner share, possibly over a network file system.

    Every rank holds the lock, because every rank writes to the folder. Rank 0 first takes the lock for itself, which
    succeeds only if no other learner's rank holds it. Then all ranks share it. A process loses the lock when it ends.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._lock: FileLock | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock. Always False on a file system without locks."""
        return self._lock is not None

    def take(self) -> None:
        """Makes the folder and takes its lock for this process alone. Waits up to WAIT_S seconds for other processes.

        Raises LearnerError if the folder is in use or cannot be used. Logs a warning if the file system has no locks.
        """
        end, waits = self._clock.monotonic() + WAIT_S, False
        while not self._taken(shared=False):
            if self._clock.monotonic() >= end:
                raise self._in_use()
            if not waits:
                log.info(
                    "waiting for the learner that uses checkpoint_dir", folder=str(self._folder), used_by=self._user()
                )
            waits = True
            time.sleep(RETRY_S)  # the system has no wait for a file lock with a time limit; training has not begun
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the text is only informational: a full disk must not stop the learner
                self._lock.write(_this_process().encode())

    def share(self) -> None:
        """Lets the other ranks hold the lock too. Rank 0 calls this before they do. Raises LearnerError."""
        if self._lock is None:
            if not self._taken(shared=True):
                raise self._in_use()
            return
        try:
            self._lock.share()
        except BlockingIOError:
            self.release()
            raise self._in_use() from None

    def release(self) -> None:
        """Ends this process's use of the folder. Repeated calls are allowed."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _taken(self, *, shared: bool) -> bool:
        """Returns whether the folder may be used now. Raises LearnerError if it cannot be used at all."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = locked(os.open(self._folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666), shared=shared)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise unusable(self._folder, error) from error
            log.warning(
                "cannot lock checkpoint_dir: make sure that no other learner uses it, or use a file "
                "system that supports locks",
                folder=str(self._folder),
                error=error.strerror,
            )
        return True

    def _in_use(self) -> LearnerError:
        return LearnerError(
            f"checkpoint_dir: {self._folder} is in use by {self._user()}: stop that learner, or give this one another "
            "name or checkpoint_dir"
        )

    def _user(self) -> str:
        """Returns which process holds the lock."""
        try:
            with (self._folder / LOCK).open(encoding="utf-8", errors="replace") as file:
                found = file.read(MAX_USER_BYTES)
        except OSError:
            found = ""
        if found == _this_process():
            return "another learner in this process"
        return found if USER.fullmatch(found) else "another process"


def unusable(folder: Path, error: OSError) -> LearnerError:
    """Returns the error for a folder that cannot be used."""
    return LearnerError(
        f"checkpoint_dir: {folder} cannot be used ({error.strerror}): give a directory that you may write to"
    )


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
