from __future__ import annotations

import asyncio

import pytest
from atoll_wire.process.tasks import first_ended, run_until_first_ends


async def _fails(text: str) -> None:
    raise ValueError(text)


async def _ends() -> None:
    """Ends at once."""


def test_the_first_failed_task_in_order_gives_the_error():
    async def both(*works) -> None:
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await first_ended(tasks)
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)

    for text in "abcdefgh":  # a set of tasks has another order each time
        with pytest.raises(ValueError, match=text):
            asyncio.run(both(_ends(), _fails(text), _fails("second")))
    asyncio.run(both(_ends()))


def test_without_an_error_all_tasks_are_awaited_on_request():
    async def slow_and_quick() -> list[bool]:
        go = asyncio.Event()
        tasks = [asyncio.ensure_future(go.wait()), asyncio.ensure_future(_ends())]
        waiting = asyncio.ensure_future(first_ended(tasks, asyncio.FIRST_EXCEPTION))
        await tasks[1]
        before = waiting.done()
        go.set()
        await waiting
        return [before, all(task.done() for task in tasks)]

    assert asyncio.run(slow_and_quick()) == [False, True]


def test_the_others_are_cancelled_and_have_ended():
    ended = list[str]()

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def run() -> None:
        with pytest.raises(ValueError, match="first"):
            await run_until_first_ends(waits("a"), _fails("first"), waits("b"))
        assert ended == ["a", "b"]

    asyncio.run(run())
