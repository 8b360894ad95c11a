"""Pools that start all threads immediately, so that a process's number of threads does not depend on its load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

STARTING_S = 1.0  # limit on the wait for all threads; a pool also works with fewer and starts the others when needed


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Returns a pool whose threads have all started. name: prefix of the threads' names.

    A pool without this wait starts each thread when it first needs one. The number of threads could then still grow
    after hours, which would hide a leak of threads.

    Example: `loop.set_default_executor(started_pool(4, "worker"))`
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    meeting = threading.Barrier(threads, timeout=STARTING_S)  # if a thread cannot start, the others must not wait
    wait([pool.submit(meeting.wait) for _ in range(threads)])
    return pool
