"""How many connections carry frames: more while more of them bring more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from atoll import lanes
from atoll.lanes import FEWEST, MOST, REST_S, SLOTS, WINDOW_ARRIVALS, WINDOW_S, Lanes, Width


def window(width: Width, rate: float, now: float) -> None:
    """One, at this rate."""
    part_s = WINDOW_S / WINDOW_ARRIVALS * (1 + 1e-9)
    for _ in range(WINDOW_ARRIVALS):
        width.arrived(int(rate * part_s), part_s, now)


def settled(rate: Callable[[int], float], windows: int = 20) -> tuple[Width, float]:
    """After so many windows over a link that carries `rate(lanes)` bytes/s."""
    width, now = Width(), 100.0
    for _ in range(windows):
        now += WINDOW_S
        window(width, rate(width.lanes), now)
    return width, now


@pytest.mark.parametrize(
    ("alone", "link", "lanes_wanted"),
    [
        (1.5e6, 25e6, 16),  # cubic at 0.05 % loss and 80 ms: 12 Mbit/s each, of 200
        (0.2e6, 25e6, MOST),
        (21e6, 22e6, FEWEST),  # bbr: one nearly fills it
        (12e6, 12e6, FEWEST),
    ],
)
def test_connections_grow_until_they_fill_the_link(alone, link, lanes_wanted):
    width, _ = settled(lambda count: min(link, count * alone))
    assert width.lanes == lanes_wanted


def test_where_the_processor_limits_nothing_grows():
    width, _ = settled(lambda count: count * 400e6)
    assert width.lanes == FEWEST


def test_more_are_tried_again_after_a_while():
    width, now = settled(lambda _: 5e6)
    assert width.lanes == FEWEST
    window(width, 5e6, now + REST_S)
    assert width.lanes == 2 * FEWEST


def test_a_link_that_becomes_slow_is_not_left_as_it_is():
    width, now = settled(lambda _: 90e6)
    assert width.lanes == FEWEST
    for _ in range(10):
        now += WINDOW_S / 10
        window(width, width.lanes * 1.5e6, now)
    assert width.lanes >= 8


def test_less_than_a_window_decides_nothing():
    width = Width()
    for _ in range(WINDOW_ARRIVALS - 1):  # long enough, and too few
        width.arrived(1000, WINDOW_S, 0.0)
    assert width.lanes == FEWEST
    width.arrived(1000, WINDOW_S, 0.0)
    assert width.lanes == 2 * FEWEST
    for _ in range(2 * WINDOW_ARRIVALS):  # many, and too short
        width.arrived(1, WINDOW_S / 100, 0.0)
    assert width.lanes == 2 * FEWEST


class Channel:
    """Counts those that are open."""

    opened = 0

    def __init__(self) -> None:
        Channel.opened += 1

    async def close(self) -> None:
        Channel.opened -= 1


def test_turns_are_bounded_and_given_in_the_order_of_asking():
    async def main() -> None:
        Channel.opened = 0
        group = Lanes(lambda: ("stub", Channel()))
        taken = [await group.take() for _ in range(SLOTS * FEWEST)]
        assert Channel.opened == FEWEST
        assert sorted(lane.busy for lane in set(taken)) == [SLOTS] * FEWEST
        order: list[int] = []

        async def wait(number: int) -> None:
            lane = await group.take()
            order.append(number)
            group.give(lane)

        waiting = [asyncio.create_task(wait(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert not order
        for lane in taken:
            group.give(lane)
        await asyncio.gather(*waiting)
        assert order == [0, 1, 2]
        await group.close()
        assert Channel.opened == 0

    asyncio.run(main())


def test_growth_gives_turns_and_idleness_takes_connections_back(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(lanes.time, "monotonic", lambda: now[0])

    async def main() -> None:
        Channel.opened = 0
        group = Lanes(lambda: ("stub", Channel()))
        lane = await group.take()
        with group.carrying() as arrived:
            for _ in range(WINDOW_ARRIVALS):
                now[0] += WINDOW_S
                arrived(1_000_000)
        assert group.count == 2 * FEWEST
        more = [await group.take() for _ in range(SLOTS * group.count - 1)]
        assert Channel.opened == group.count
        for each in (lane, *more):
            group.give(each)
        group.rest()
        assert Channel.opened == group.count, "it was busy just now"
        now[0] += lanes.IDLE_S + 1
        group.rest()
        await asyncio.sleep(0)
        assert (Channel.opened, group.count) == (1, FEWEST)
        taken = [await group.take() for _ in range(SLOTS * 2 * FEWEST)]  # the turns of those connections, once more
        for each in taken:
            group.give(each)
        assert group._capacity == SLOTS * FEWEST

    asyncio.run(main())
