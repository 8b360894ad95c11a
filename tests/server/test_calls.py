"""Long waits of calls end immediately on request, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from atoll_server.access.refusals import Refused, Status
from atoll_server.rpc.calls import InterruptibleWait, InterruptibleWaits

GONE = Refused(Status.UNAUTHENTICATED, "it joined again")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10.0))


async def silence() -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()


def test_an_ended_wait_raises_the_reason_and_so_does_every_later_one():
    async def main() -> None:
        wait, messages = InterruptibleWait(), silence()
        assert await wait.next(messages) == 1
        asyncio.get_running_loop().call_soon(wait.end, GONE)
        for _ in range(2):
            with pytest.raises(Refused, match="it joined again") as refused:
                await wait.next(messages)
            assert refused.value.status is Status.UNAUTHENTICATED

    run(main())


def test_a_message_that_arrives_with_the_end_is_not_accepted():
    async def main() -> None:
        wait = InterruptibleWait()

        async def messages() -> AsyncIterator[int]:
            wait.end(GONE)
            yield 1

        with pytest.raises(Refused, match="joined again"):
            await wait.next(messages())

    run(main())


def test_a_wait_that_lasts_too_long_names_its_subject():
    async def main() -> None:
        wait, messages = InterruptibleWait(), silence()
        await wait.next(messages)
        with pytest.raises(Refused, match="nothing came") as refused:
            await wait.next(messages, 0.01, "nothing came")
        assert refused.value.status is Status.UNAVAILABLE

    run(main())


def test_all_calls_of_a_stopping_service_end_even_new_ones():
    async def main() -> None:
        waits, messages = InterruptibleWaits(), silence()
        early = waits.begin()
        await early.next(messages)
        asyncio.get_running_loop().call_soon(waits.end, "it is stopping")
        with pytest.raises(Refused, match="stopping"):
            await early.next(messages)
        with pytest.raises(Refused, match="stopping"):
            await waits.begin().first(silence(), "a stream")

    run(main())
