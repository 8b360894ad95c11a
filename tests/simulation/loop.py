"""An event loop on a virtual clock, and processes on it that can be killed at any await.

Time passes only when nothing is left to do at this moment, so a minute of a run takes as long as its events take. Work
for threads is done on the loop after a delay from the seed. The same seed gives the same run.
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
    """Raised into a process that was killed, wherever it next touches the world."""


class Process:
    """What dies together. Everything that it started carries it in its context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.born: float | None = None  # by the wall clock, when it was first started
        self._tasks: list[weakref.ref[asyncio.Task[Any]]] = []  # in the order of their starts; some may have ended
        self._many = 64  # when to look which have
        self.on_death: list[Callable[[], None]] = []
        self.countdown: int | None = None  # touches of the disk and crash points until it is killed

    def start(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """Runs work as a part of this process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "processes run on the virtual clock"
        self.born = loop.clock.wall() if self.born is None else self.born
        return loop.create_task(work, name=name, context=context)

    def kill(self) -> None:
        """SIGKILL: what is in its memory is gone, and nothing that it still runs can touch anything."""
        if not self.alive:
            return
        self.alive = False
        for task in [task() for task in self._tasks]:
            if task is not None:
                task.cancel()
        for told in self.on_death:
            told()

    def owns(self, task: asyncio.Task[Any]) -> None:
        """It dies with this process."""
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) >= self._many:
            self._tasks = [each for each in self._tasks if (task_ := each()) is not None and not task_.done()]
            self._many = 64 + 2 * len(self._tasks)

    def touch(self) -> None:
        """Something outside of its memory is touched. Raises Dead, at the latest when the countdown has ended."""
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown <= 0:
                self.countdown = None
                self.kill()
        if not self.alive:
            raise Dead


def here() -> Process | None:
    """The process whose code runs."""
    return PROCESS.get()


class Handle:
    """What is to be done: asyncio's own does more, and most of what a seed costs is this. context: None is the world's.

    process: whose death ends it; nobody's if None.
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
    """Of a loop; what the product is given in place of the machine's."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now

    def wall(self) -> float:
        return 1.7e9 + self._loop.now


class VirtualLoop(asyncio.BaseEventLoop):
    """time() is what the simulation says. slow_s: a mean of what threads take; now and then much longer."""

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
        """One turn of the loop. Nothing comes from outside, so waiting is a jump of the clock."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while timers and timers[0][2].done:
            heapq.heappop(timers)
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            assert timers, "nothing is left that could ever happen"
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
        """Nothing has to be woken up."""

    def get_debug(self) -> bool:
        """Asked for every handle."""
        return False

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """As the base, without its checks for what cannot be here."""
        context = contextvars.copy_context() if context is None else context
        handle = Handle(callback, args, context, None, self.now)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    call_soon_threadsafe = call_soon  # there is one thread

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        """As the base, but for timers of a process that has died meanwhile."""
        context = contextvars.copy_context() if context is None else context
        handle = Handle(callback, args, context, PROCESS.get(), when)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def after(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        """A timer of the world: no process's death ends it."""
        when = self.now + delay_s
        heapq.heappush(self._timers, (when, next(self._numbers), Handle(callback, args, None, None, when)))

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Does it at once, but after a delay: threads are slow, not mad."""
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
