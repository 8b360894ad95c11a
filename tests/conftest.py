"""Fixtures that several folders use."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

ENDING_S = 5.0  # limit on the wait for threads of a learner that has left


@pytest.fixture(scope="session", autouse=True)
def no_contexts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hides the contexts of the person who runs the tests, from this process and from the commands that it starts."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture
def unused_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _open() -> Counter[str]:
    """Returns the names of this process's learners, and of the threads of learners and followers."""
    learners = getattr(sys.modules.get("atoll.started_learners"), "_started", ())
    threads = (thread.name for thread in threading.enumerate())
    return Counter([*(each.name for each in learners), *(name for name in threads if name.startswith("atoll "))])


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Fails a test that leaves a learner or a follower open, which may disturb later tests in the process.

    A test may replace its module's learner by one of the same name.
    """
    before, handler = _open(), signal.getsignal(signal.SIGTERM)
    yield
    pause = threading.Event()  # never set; used to wait
    for _ in range(int(ENDING_S / 0.05)):
        if not (left := _open() - before):
            break
        pause.wait(0.05)
    assert not left, f"the test left these open: {list(left)}"
    assert signal.getsignal(signal.SIGTERM) is handler, "the test left another SIGTERM handler"
