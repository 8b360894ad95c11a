"""Waits for several asyncio tasks in a fixed order, so that a simulated run can be repeated exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def first_ended(tasks: Sequence[asyncio.Task[Any]], until: str = asyncio.FIRST_COMPLETED) -> None:
    """Waits until a task has ended. Raises the error of the first such task in `tasks`, if any has an error.

    until: asyncio.FIRST_COMPLETED or asyncio.FIRST_EXCEPTION. The sets that `asyncio.wait` returns have no fixed order.
    """
    await asyncio.wait(tasks, return_when=until)
    for task in tasks:
        if task.done():
            task.result()


async def end_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until they have ended. Their done callbacks must retrieve their errors.

    A cancelled task may still raise an error: gRPC raises a status that arrived just before the cancellation.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def run_until_first_ends(*works: Coroutine[Any, Any, Any]) -> None:
    """Runs coroutines until one has ended and then cancels the others. Raises the error of the one that ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await first_ended(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
