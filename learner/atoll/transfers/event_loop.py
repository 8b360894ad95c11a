"""The event loop of a background thread: its worker threads, and the known gRPC errors that it ignores."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll_wire.process.worker_threads import started_pool

LOOP_CLOSED = "Event loop is closed"
WORKERS = 4  # threads for encoding, decoding and disk; each works on one fragment at a time


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
