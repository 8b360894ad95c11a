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
        self.began, self.ended = threading.Event(), threading.Event()
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
    """A busy thread acquires the GIL whenever the caller releases it, and then keeps it for a switch interval."""
    called, done = threading.Event(), threading.Event()
    busy = threading.Thread(target=lambda: all(iter(lambda: not done.is_set(), False)))
    usual_s, interval_s, times = sys.getswitchinterval(), 0.2, []
    sys.setswitchinterval(interval_s)
    busy.start()
    try:
        for _ in range(5):
            time.sleep(0)  # begins a new interval
            began = time.perf_counter()
            ringing.bell.call(called.set)
            times.append(time.perf_counter() - began)
    finally:
        sys.setswitchinterval(usual_s)
        done.set()
        busy.join()
    assert called.wait(10.0)
    assert max(times) < interval_s


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
