"""An event loop on a virtual clock, with processes that can be killed at any await.

The clock advances only when no callback is ready, so a run needs no real waiting. Work for threads runs on the loop
after a random delay. A seed always gives the same run.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Dead(BaseException):
    """Raised in a killed process at its next access to the outside world."""


class Process:
    """A group of tasks that die together. All of them carry their process in their context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.born: float | None = None  # wall-clock time of its first start
        self._tasks: list[weakref.ref[asyncio.Task[Any]]] = []  # in order of their starts; some may have ended
        self._many = 64  # number of tasks above which ended ones are removed
        self.on_death: list[Callable[[], None]] = []
        self.countdown: int | None = None  # disk accesses and crash points until its death

    def start(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """Runs a task as a part of this process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "processes run on the virtual clock"
        self.born = loop.clock.wall() if self.born is None else self.born
        return loop.create_task(work, name=name, context=context)

    def kill(self) -> None:
        """Kills the process like SIGKILL. Its memory is lost, and its tasks lose access to disk and network."""
        if not self.alive:
            return
        self.alive = False
        for task in [task() for task in self._tasks]:
            if task is not None:
                task.cancel()
        for told in self.on_death:
            told()

    def owns(self, task: asyncio.Task[Any]) -> None:
        """Returns whether the task dies with this process."""
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) >= self._many:
            self._tasks = [each for each in self._tasks if (task_ := each()) is not None and not task_.done()]
            self._many = 64 + 2 * len(self._tasks)

    def touch(self) -> None:
        """Records an access to the outside world. Raises Dead if the process was killed, or when the countdown ends."""
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown <= 0:
                self.countdown = None
                self.kill()
        if not self.alive:
            raise Dead


def here() -> Process | None:
    """Returns the process of the running code."""
    return PROCESS.get()


class Handle:
    """A scheduled callback. It is lighter than asyncio's, because it causes most of a seed's cost.

    context: None for the world's. process: the process whose death cancels it, or None.
    """

    __slots__ = ("_at", "args", "callback", "context", "done", "process")

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Any, process: Process | None, at: float
    ) -> None:
        self.callback, self.args, self.context, self.process = callback, args, context, process
        self._at, self.done = at, False

    def cancel(self) -> None:
        self.done = True

    def cancelled(self) -> bool:
        return self.done

    def when(self) -> float:
        return self._at


class VirtualClock:
    """The clock of a loop, in place of the machine's."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now

    def wall(self) -> float:
        return 1.7e9 + self._loop.now


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop with virtual time. slow_s: mean duration of work in threads, which is sometimes much longer."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng, self.now, self.slow_s = rng, 0.0, 0.002
        self.clock = VirtualClock(self)
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = itertools.count()
        self.set_task_factory(_task)
        self.set_exception_handler(self._unhandled)
        self.unhandled: list[dict[str, Any]] = []

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        """Makes one turn of the loop. Without outside input, waiting only advances the clock."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while timers and timers[0][2].done:
            heapq.heappop(timers)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            assert timers, "no timer is left, so the run would never end"
            self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.done or (handle.process is not None and not handle.process.alive):
                continue
            try:
                if handle.context is None:
                    handle.callback(*handle.args)
                else:
                    handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"{handle.callback} raised", "exception": error})

    def _write_to_self(self) -> None:
        """Does nothing, because no thread waits."""

    def get_debug(self) -> bool:
        """Returns False. asyncio calls this for every handle."""
        return False

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """Does the same as the base class, without its checks."""
        context = contextvars.copy_context() if context is None else context
        handle = Handle(callback, args, context, None, self.now)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon  # there is only one thread

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """Sets a timer, which never fires if its process is dead."""
        context = contextvars.copy_context() if context is None else context
        handle = Handle(callback, args, context, PROCESS.get(), when)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def after(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        """Sets a timer that no process's death cancels."""
        when = self.now + delay_s
        heapq.heappush(self._timers, (when, next(self._numbers), Handle(callback, args, None, None, when)))

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs the function immediately, and returns its result after a delay, like a slow thread."""
        done: asyncio.Future[Any] = self.create_future()
        process, delay = here(), self.rng.expovariate(1 / self.slow_s)
        if self.rng.random() < 0.005:
            delay += self.rng.uniform(0.1, 1.0)  # a slow disk

        def work() -> None:
            try:
                result = func(*args)
            except Dead:
                return
            except BaseException as error:
                if not done.done():
                    done.set_exception(error)
                return
            if not done.done() and (process is None or process.alive):
                done.set_result(result)

        self.call_later(delay, work)
        return done

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Dead):
            self.unhandled.append(context)


def _task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Any = None) -> asyncio.Task[Any]:
    process = context.get(PROCESS) if context is not None else PROCESS.get()
    task = asyncio.Task(work, loop=loop, context=context)
    if process is not None:
        process.owns(task)
        if not process.alive:
            task.cancel()
    return task
