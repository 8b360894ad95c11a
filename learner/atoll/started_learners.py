"""The learners that this process has started and not closed. They leave the run when the process ends, or on SIGTERM.

A process has at most one learner of a name at a server. In a notebook, a cell may be executed again while the learner
that it started is still in the run.
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

LEAVING_S = 6.0  # limit on the delay of SIGTERM; the timeout of Leave is shorter
TERMINATED = 128 + signal.SIGTERM  # exit status, as shells report it


@dataclass(frozen=True, slots=True, eq=False)
class StartedLearner:
    """A learner that the current thread is starting. name, servers: its name, and the addresses of its servers.

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
    """Adds a learner. Closes an earlier learner of the same name and servers.

    If another living thread uses the earlier learner, that learner stays, and the core refuses the new one.
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
    os._exit(TERMINATED)  # the first process of a container ignores the signal
