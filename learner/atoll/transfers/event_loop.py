"""The event loop of a background thread: its worker threads, and known errors of gRPC."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

LOOP_CLOSED = "Event loop is closed"
WORKERS = 4  # threads for encoding, decoding and disk; each works on one fragment at a time
MEET_S = 1.0


def started_workers() -> ThreadPoolExecutor:
    """Returns a pool whose threads have all started, so that the thread count does not depend on the load."""
    pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="atoll worker")
    meeting = threading.Barrier(WORKERS, timeout=MEET_S)  # if a thread cannot start, the others must not wait
    wait([pool.submit(meeting.wait) for _ in range(WORKERS)])
    return pool


def ignore_known_grpc_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignores two known errors of several gRPC loops in a process (grpc#25364).

    For each event, gRPC wakes all loops, including loops without an event and loops that have closed.
    """
    error = context.get("exception")
    known = isinstance(error, BlockingIOError) or (isinstance(error, RuntimeError) and str(error) == LOOP_CLOSED)
    if not (known and "PollerCompletionQueue" in context["message"]):
        loop.default_exception_handler(context)
