"""A shard's threads and tasks. The process ends if a task fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
A = TypeVarTuple("A")

FRAME_THREADS = 2
MERGE_THREADS = 2


class Work:
    """One shard's threads and tasks, from `start` to `stop`.

    failed: whether a task failed. The state may then be partly changed, so the shard writes no more data.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        """fail: function that ends the process with a failed task's error."""
        self._fail = fail
        self.failed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._frames: ThreadPoolExecutor  # set by `start`, as is the next attribute
        self._merges: ThreadPoolExecutor

    def start(self) -> None:
        self._frames = ThreadPoolExecutor(FRAME_THREADS, thread_name_prefix="frames")
        self._merges = ThreadPoolExecutor(MERGE_THREADS, thread_name_prefix="merge")

    async def stop(self) -> None:
        """Waits for all tasks and the tasks that they spawn, then ends the threads."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self._frames.shutdown()
        self._merges.shutdown()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task whose failure ends the process."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Sets `failed` and ends the process with this error."""
        self.failed = True
        self._fail(error)

    def on_frames(self, function: Callable[[*A], T], *args: *A) -> asyncio.Future[T]:
        """Runs a function in a thread for frames and their files, even if the future is not awaited."""
        return asyncio.get_running_loop().run_in_executor(self._frames, function, *args)

    def on_merges(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Runs a function in a thread for merges."""
        return asyncio.get_running_loop().run_in_executor(self._merges, function)
