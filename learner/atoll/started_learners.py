"""The learners that this process has started and not closed. They leave the run when the process ends, or on SIGTERM.

A process has at most one learner of a name at a server, so starting another one closes the earlier one. For example, a
user may run a notebook cell again while the learner that the cell started is still in the run.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

import structlog

log = structlog.get_logger()

LEAVING_S = 6.0  # longest time in seconds by which SIGTERM is delayed; the Leave call's timeout is shorter
TERMINATED = 128 + signal.SIGTERM  # the exit status that shells report for a process ended by SIGTERM


@dataclass(frozen=True, slots=True, eq=False)
class StartedLearner:
    """A learner that is started and not closed. servers: addresses of its servers. thread: the thread that started it.

    close: ends the learner without sending outstanding work. leave: only leaves the run; any thread may call it.
    """

    name: str
    servers: Sequence[str]
    close: Callable[[], None]
    leave: Callable[[], None]
    thread: threading.Thread = field(default_factory=threading.current_thread)


_started: list[StartedLearner] = []
_at_exit = False


def add(learner: StartedLearner) -> None:
    """Adds a learner, and closes an earlier learner of the same name and servers.

    If another thread that is still alive started the earlier learner, that learner stays, and the core refuses the new
    one.
    """
    global _at_exit  # noqa: PLW0603 - the exit hook is set once
    if not _at_exit:
        atexit.register(_leave)
        os.register_at_fork(after_in_child=_forget)
        _at_exit = True
    for earlier in _started.copy():
        is_free = earlier.thread is learner.thread or not earlier.thread.is_alive()
        if (earlier.name, [*earlier.servers]) == (learner.name, [*learner.servers]) and is_free:
            log.warning("closing this process's earlier learner of the same name", learner=learner.name)
            earlier.close()
    _started.append(learner)
    if _may_set_handlers() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def remove(learner: StartedLearner) -> None:
    """Removes a learner that has left the run."""
    if learner in _started:
        _started.remove(learner)
    if not _started:
        _restore_handler()


def _may_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()


def _restore_handler() -> None:
    if _may_set_handlers() and signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _forget() -> None:
    """Empties the list in a forked child, because the learners belong to the parent."""
    _started.clear()
    _restore_handler()


def _leave() -> None:
    for learner in _started.copy():
        learner.leave()


def _terminate(number: int, _frame: FrameType | None) -> None:
    """Leaves the run, and then ends the process as SIGTERM would without this handler."""
    leaving = threading.Thread(target=_leave, daemon=True)  # the interrupted thread may hold a lock that leaving needs
    leaving.start()
    leaving.join(LEAVING_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(TERMINATED)  # reached in a container's first process, which ignores the signal
