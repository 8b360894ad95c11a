"""The number of connections that carry frames grows while more connections are faster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from atoll_wire.connections import parallel_connections
from atoll_wire.connections.parallel_connections import (
    FAR_CONNECTIONS,
    FAR_S,
    MAX_CONNECTIONS,
    MIN_CONNECTIONS,
    NEWEST,
    REST_S,
    SLOTS,
    WINDOW_ARRIVALS,
    WINDOW_S,
    ConnectionCount,
    ParallelConnections,
)
from atoll_wire.process.clock import SYSTEM

from tests.clocks import SetClock

NEAR_S, LONG_S = FAR_S / 10, 8 * FAR_S  # round trips in seconds


def window(width: ConnectionCount, rate: float, now: float) -> None:
    """Simulates one measuring window at this rate in bytes/s."""
    part_s = WINDOW_S / WINDOW_ARRIVALS * (1 + 1e-9)
    for _ in range(WINDOW_ARRIVALS):
        width.arrived(int(rate * part_s), part_s, now)


def answered(width: ConnectionCount | ParallelConnections, round_trip_s: float) -> None:
    """Simulates answers with this round trip."""
    for number in range(NEWEST):
        after_s = 5.0 if number % 2 else round_trip_s
        _ = width.answered(after_s, 0.0) if isinstance(width, ConnectionCount) else width.answered(after_s)


def settled(
    rate: Callable[[int], float], round_trip_s: float = LONG_S, windows: int = 20
) -> tuple[ConnectionCount, float]:
    """Simulates windows over a link that carries `rate(parallel_connections)` bytes/s.

    Returns the count and the time.
    """
    width, now = ConnectionCount(), 100.0
    answered(width, round_trip_s)
    for _ in range(windows):
        now += WINDOW_S
        window(width, rate(width.lanes), now)
    return width, now


@pytest.mark.parametrize(
    ("alone", "link", "hurt_from", "lanes_wanted"),
    [
        (1e6, 25e6, FAR_CONNECTIONS, FAR_CONNECTIONS),  # a middlebox that slows down with many connections
        (1.5e6, 25e6, MAX_CONNECTIONS, MAX_CONNECTIONS),  # cubic at 0.05 % loss and 80 ms: 12 Mbit/s each, of 200
        (
            21e6,
            22e6,
            MAX_CONNECTIONS,
            MAX_CONNECTIONS,
        ),  # bbr: one connection nearly fills the link, and more start faster after a pause
    ],
)
def test_on_a_long_link_connections_grow_while_throughput_grows(alone, link, hurt_from, lanes_wanted):
    width, _ = settled(lambda count: min(link, count * alone) * (0.4 if count > hurt_from else 1.0), windows=10)
    assert width.lanes == lanes_wanted


def test_a_short_link_needs_one_connection():
    width, _ = settled(lambda count: count * 1e6, NEAR_S)
    assert width.lanes == MIN_CONNECTIONS


def test_before_enough_answers_nothing_grows():
    width = ConnectionCount()
    width.answered(LONG_S, 0.0)
    window(width, 1e6, 100.0)
    assert width.lanes == MIN_CONNECTIONS


def test_a_link_that_proves_short_gets_the_fewest_connections_again():
    width, _ = settled(lambda count: count * 1e6)
    assert width.lanes == MAX_CONNECTIONS
    width.answered(NEAR_S, 0.0)
    assert width.lanes == MIN_CONNECTIONS


def test_a_link_that_became_long_gets_connections_at_once_and_after_a_pause():
    width = ConnectionCount()
    answered(width, NEAR_S)
    answered(width, LONG_S)
    assert width.lanes == FAR_CONNECTIONS
    width.idle()
    assert width.lanes == MIN_CONNECTIONS
    answered(width, LONG_S)
    assert width.lanes == FAR_CONNECTIONS


def test_connections_do_not_grow_if_the_cpu_is_the_limit():
    width, _ = settled(lambda count: count * 400e6)
    assert width.lanes == FAR_CONNECTIONS


def test_more_connections_are_tried_again_after_some_time():
    width, now = settled(lambda count: 5e6 / count, windows=10)
    assert width.lanes == FAR_CONNECTIONS
    window(width, 5e6, now + REST_S)
    assert width.lanes == 2 * FAR_CONNECTIONS


def test_less_than_a_window_decides_nothing():
    width = ConnectionCount()
    answered(width, LONG_S)
    window(width, 1e6, 0.0)  # arrivals of frames that were in flight
    for _ in range(WINDOW_ARRIVALS - 1):  # long enough, but too few
        width.arrived(1000, WINDOW_S, 0.0)
    assert width.lanes == FAR_CONNECTIONS
    width.arrived(1000, WINDOW_S, 0.0)
    assert width.lanes == 2 * FAR_CONNECTIONS
    for _ in range(2 * WINDOW_ARRIVALS):  # enough, but too short
        width.arrived(1, WINDOW_S / 100, 0.0)
    assert width.lanes == 2 * FAR_CONNECTIONS


class Channel:
    """A channel that counts its open instances."""

    opened = 0

    def __init__(self) -> None:
        Channel.opened += 1

    async def close(self) -> None:
        Channel.opened -= 1


def test_turns_are_limited_and_granted_in_the_order_of_requests():
    async def main() -> None:
        Channel.opened = 0
        group = ParallelConnections(lambda: ("stub", Channel()), SYSTEM)
        taken = [await group.take() for _ in range(SLOTS * MIN_CONNECTIONS)]
        assert Channel.opened == MIN_CONNECTIONS
        assert sorted(carrier.busy for carrier in set(taken)) == [SLOTS] * MIN_CONNECTIONS
        order: list[int] = []

        async def wait(number: int) -> None:
            carrier = await group.take()
            order.append(number)
            group.give(carrier)

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert not order
        for carrier in taken:
            group.give(carrier)
        await asyncio.gather(*waiting)
        assert order == [0, 1, 2]
        await group.close()
        assert Channel.opened == 0

    asyncio.run(main())


def test_growth_adds_turns_and_idleness_closes_connections():
    clock = SetClock(steady=1000.0)

    async def main() -> None:
        Channel.opened = 0
        group = ParallelConnections(lambda: ("stub", Channel()), clock)
        carrier = await group.take()
        answered(group, LONG_S)
        assert (group.count, group.spare) == (FAR_CONNECTIONS, True)
        with group.carrying() as carried:
            for _ in range(2 * WINDOW_ARRIVALS):  # idle connections without frames to send give no rate
                clock.steady += WINDOW_S
                carried.arrived(1_000_000)
            assert group.count == FAR_CONNECTIONS
            carried.waiting(3)
            for _ in range(2 * WINDOW_ARRIVALS):
                clock.steady += WINDOW_S
                carried.arrived(1_000_000)
        assert group.count == 2 * FAR_CONNECTIONS
        more = [await group.take() for _ in range(SLOTS * group.count - 1)]
        assert Channel.opened == group.count
        for each in (carrier, *more):
            group.give(each)
        await group.rest()
        assert Channel.opened == group.count, "busy connections must stay"
        clock.steady += parallel_connections.IDLE_S + 1
        await group.rest()
        await asyncio.sleep(0)
        assert (Channel.opened, group.count) == (1, MIN_CONNECTIONS)
        answered(group, LONG_S)
        taken = [await group.take() for _ in range(SLOTS * FAR_CONNECTIONS)]  # these connections' turns, once more
        for each in taken:
            group.give(each)
        assert group._capacity == SLOTS * FAR_CONNECTIONS

    asyncio.run(main())


def test_the_wait_for_a_frame_is_slightly_longer_than_usual():
    async def main() -> None:
        group = ParallelConnections(lambda: ("stub", Channel()), SYSTEM)
        with group.carrying() as carried:
            for _ in range(100):
                carried.arrived(1000, [0.4, 0.8])
        assert 0.7 < group.max_wait_s < 1.0

    asyncio.run(main())


def test_frames_share_messages_only_on_short_links():
    async def main() -> None:
        group = ParallelConnections(lambda: ("stub", Channel()), SYSTEM)
        assert group.together == 1, "without measurements, frames must go alone"
        with group.carrying() as carried:
            carried.arrived(1000, [0.01] * 50)
        assert group.together > 1
        answered(group, LONG_S)
        assert group.together == 1

    asyncio.run(main())


def test_the_round_trip_is_the_shortest_response_time_and_zero_if_there_is_none():
    width = ConnectionCount()
    assert width.round_trip_s == 0.0
    answered(width, LONG_S)
    assert width.round_trip_s == LONG_S
