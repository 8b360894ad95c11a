"""A pool of shared connections: their number, their use by calls, and their closing."""

from __future__ import annotations

import asyncio

import pytest
from atoll_wire.connections import link as links
from atoll_wire.connections.calls import LinkLost
from atoll_wire.connections.connection_pool import IDLE_S, ConnectionPool
from atoll_wire.process.clock import SYSTEM
from atoll_wire.security.transport import LOCAL

from tests.clocks import SetClock


class Channel:
    """A channel that knows whether it is open."""

    def __init__(self) -> None:
        self.open = True

    async def close(self) -> None:
        self.open = False


class Dial:
    """Opens connections, and records them."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []

    def __call__(self, *_: object) -> tuple[str, Channel]:
        self.channels.append(Channel())
        return "stub", self.channels[-1]

    @property
    def open(self) -> int:
        return sum(each.open for each in self.channels)


def test_a_connection_is_opened_when_the_others_are_full_up_to_a_limit():
    pool = ConnectionPool(dial := Dial(), SYSTEM, share=2, most=3)
    assert dial.open == 0
    taken = [pool.take() for _ in range(6)]
    assert (dial.open, [each.busy for each in pool.connections]) == (3, [2, 2, 2])
    pool.take()
    assert (dial.open, sum(each.busy for each in pool.connections)) == (3, 7)
    pool.give(taken[2])
    pool.give(taken[3])
    assert pool.take() is taken[2], "the pool must choose the least busy connection"


def test_long_idle_connections_close_except_the_fewest():
    clock = SetClock(steady=1000.0)

    async def main() -> None:
        pool = ConnectionPool(dial := Dial(), clock, share=1, fewest=1)
        first, busy, idle = pool.take(), pool.take(), pool.take()
        pool.give(first)
        pool.give(idle)
        clock.steady += IDLE_S - 1
        await pool.rest()
        assert dial.open == 3
        clock.steady += 1
        await pool.rest()
        assert pool.connections == [first, busy]
        assert [each.open for each in dial.channels] == [True, True, False]

    asyncio.run(main())


def test_a_pool_that_was_closed_dials_nothing():
    async def main() -> None:
        pool = ConnectionPool(dial := Dial(), SYSTEM, share=1, fewest=1)
        pool.take()
        await pool.close()
        with pytest.raises(LinkLost):
            pool.take()
        assert (dial.open, len(dial.channels)) == (0, 1)

    asyncio.run(main())


def test_a_retired_link_ends_quick_calls_immediately_and_others_once_idle(monkeypatch):
    monkeypatch.setattr(links, "DEAD_S", 0.2)

    class Call:
        def __init__(self) -> None:
            self.cancelled = asyncio.Event()

        def cancel(self) -> None:
            self.cancelled.set()

    class Dialled(links.Link):
        def _dial(self, options):
            return ("stub", (quick if options == links.KEEPALIVE_OPTIONS else frames)()[1])

    quick, frames = Dial(), Dial()

    async def main() -> None:
        link, call = Dialled("here", LOCAL, SYSTEM, keepalive=True), Call()
        link.quick.take()
        for take in (link.carriers.take, link.offers.take):
            take()
        for lanes in (link.up, link.down):
            lanes.give(await lanes.take())
        assert (quick.open, frames.open) == (1, 4)
        with link.transfers.of(call):
            ending = asyncio.create_task(links.close_gracefully(link))
            await asyncio.sleep(0.01)
            assert (quick.open, frames.open) == (0, 4)
            for take in (link.up.take, link.down.take):
                with pytest.raises(LinkLost):
                    await take()
            await call.cancelled.wait()
            assert frames.open == 4
        await ending
        assert frames.open == 0

    asyncio.run(asyncio.wait_for(main(), 10))
