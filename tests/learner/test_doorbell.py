"""Calls from a training thread to an event loop's thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest
from atoll.transfers.event_loop import Doorbell


class Ringing:
    """A thread with an event loop and a doorbell."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._live()))
        self.thread.start()
        self.began.wait()

    async def _live(self) -> None:
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        self.bell = Doorbell(self.loop)
        self.began.set()
        await self.over.wait()
        self.bell.close()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.thread.join()


@pytest.fixture
def ringing():
    it = Ringing()
    yield it
    it.end()


def test_the_caller_keeps_the_gil(ringing):
    """Another thread counts whenever it gets the GIL. It gets the GIL only if the caller releases it."""
    counted, done, called = [0], threading.Event(), threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)  # releases the GIL, because no thread is forced to

    counting = threading.Thread(target=count)
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # no thread is forced to release the GIL
    counting.start()
    try:
        for _ in range(1000):
            before = counted[0]
            ringing.bell.call(called.set)
            assert counted[0] == before
            time.sleep(0)
    finally:
        sys.setswitchinterval(usual_s)
        done.set()
        counting.join()
    assert called.wait(10.0)
    assert counted[0] > 0


def test_more_calls_than_the_pipe_can_hold_all_arrive_in_order(ringing):
    arrived, held, go_on = [], threading.Event(), threading.Event()
    ringing.bell.call(lambda: (held.set(), go_on.wait()))
    held.wait()
    for number in range(100_000):
        ringing.bell.call(lambda number=number: arrived.append(number))
    done = threading.Event()
    ringing.bell.call(done.set)
    go_on.set()
    assert done.wait(10.0)
    assert arrived == [*range(100_000)]


def test_a_function_that_raises_does_not_stop_later_calls(ringing):
    told, done = [], threading.Event()
    ringing.loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    ringing.bell.call(lambda: 1 // 0)
    ringing.bell.call(done.set)
    assert done.wait(10.0)
    assert [type(each) for each in told] == [ZeroDivisionError]


def test_a_call_after_the_end_does_nothing():
    it = Ringing()
    it.end()
    called = []
    it.bell.call(lambda: called.append(1))
    assert not called
