"""A front reconnects to the core after it lost working connections, but not after early failed attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import structlog
from atoll_server.upstream.core_connection import AGAIN_S, CoreConnection
from atoll_wire.connections.link import Link
from atoll_wire.security.transport import LOCAL

from tests.clocks import SetClock

LONG_S = AGAIN_S + 1.0


def answers(core: CoreConnection, clock: SetClock) -> None:
    core.answered(core.link)


def fails(core: CoreConnection, clock: SetClock) -> None:
    core.suspect(core.link)


def long_after(core: CoreConnection, clock: SetClock) -> None:
    clock.steady += LONG_S


def soon_after(core: CoreConnection, clock: SetClock) -> None:
    clock.steady += AGAIN_S / 2


@pytest.mark.parametrize(
    ("story", "dialled"),
    [
        ((fails, soon_after, answers, long_after), False),  # the core served after the first attempt
        ((fails, soon_after, answers, fails, long_after), False),  # an earlier attempt fails after the first answer
        ((soon_after, soon_after, answers, soon_after, fails), False),
        ((answers, long_after, fails), True),  # a working connection broke
        ((fails, long_after, fails), True),  # the core has not answered for a long time
        ((soon_after, answers, long_after, answers, fails), True),  # later answers change nothing
    ],
)
def test_a_link_is_replaced_only_while_it_fails(story: tuple[Callable[..., None], ...], dialled: bool):
    async def main() -> None:
        clock = SetClock()
        core = CoreConnection("127.0.0.1:1", LOCAL, clock, Link)
        first = core.link
        for happens in story:
            happens(core, clock)
            await core.look()
        assert (core.link is not first) == dialled
        await core.close()

    asyncio.run(main())


def test_calls_that_end_on_an_old_link_do_not_replace_the_new_one():
    async def main() -> None:
        clock = SetClock()
        core = CoreConnection("127.0.0.1:1", LOCAL, clock, Link)
        old = core.link
        long_after(core, clock)
        core.suspect(old)
        new = core.link
        long_after(core, clock)
        core.answered(old)
        core.suspect(old)
        await core.look()
        assert core.link is new is not old
        await core.close()

    asyncio.run(main())


def test_the_log_tells_each_outage_and_its_end_once():
    async def main() -> None:
        clock = SetClock()
        with structlog.testing.capture_logs() as lines:
            core = CoreConnection("127.0.0.1:1", LOCAL, clock, Link)
            for happens in (fails, long_after, fails, long_after, fails, answers, answers, fails, fails, answers):
                happens(core, clock)
        await core.close()
        down, up = "the core does not answer: trying again until it does", "connected to the core"
        assert [line["event"] for line in lines] == [down, up, down, up]

    asyncio.run(main())
