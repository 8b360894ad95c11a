"""The event loop of a background thread: calls from other threads, worker threads, and known gRPC errors."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll_wire.process.worker_threads import started_pool

LOOP_CLOSED = "Event loop is closed"
WORKERS = 4  # threads for encoding, decoding and disk; each works on one fragment at a time


class Doorbell:
    """Calls functions on an event loop from another thread, without releasing the GIL.

    `loop.call_soon_threadsafe` writes to a socket, which releases the GIL. The loop's thread then acquires it, and the
    caller waits until the loop's thread releases it: about 0.5 ms for each contribution. Here, the loop's thread waits
    until the caller computes without the GIL.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call this on the loop's thread."""
        self._loop = loop
        self._calls = deque[Callable[[], object]]()
        self._out, self._in = os.pipe()
        for end in (self._out, self._in):
            os.set_blocking(end, False)
        self._write = ctypes.PyDLL(None).write  # PyDLL keeps the GIL
        self._open = True
        self._lock = threading.Lock()  # protects `_open`
        loop.add_reader(self._out, self._answer)

    def call(self, function: Callable[[], object]) -> None:
        """Calls the function on the loop soon. Does nothing after `close`."""
        with self._lock:
            if self._open:
                self._calls.append(function)
                self._write(self._in, b"\0", 1)  # if the pipe is full, it already wakes the loop

    def _answer(self) -> None:
        os.read(self._out, 4096)
        while self._calls:
            self._loop.call_soon(self._calls.popleft())

    def close(self) -> None:
        """Ends the calls. Call this on the loop's thread."""
        self._loop.remove_reader(self._out)
        with self._lock:
            self._open = False
        os.close(self._out)
        os.close(self._in)


def started_workers() -> ThreadPoolExecutor:
    """Returns the pool for the slow work of one event loop. All its threads have started."""
    return started_pool(WORKERS, "atoll worker")


def ignore_known_grpc_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignores two known gRPC errors in processes with several event loops (grpc#25364).

    For each event, gRPC wakes all loops, including loops without an event and loops that have closed.
    """
    error = context.get("exception")
    known = isinstance(error, BlockingIOError) or (isinstance(error, RuntimeError) and str(error) == LOOP_CLOSED)
    if not (known and "PollerCompletionQueue" in context["message"]):
        loop.default_exception_handler(context)
