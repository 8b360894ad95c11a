"""All readers of a process share separate slots: they wait for each other, not for learners."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from atoll_server.access.quotas import LIMITS
from atoll_server.access.refusals import Refused, Status
from atoll_server.rpc.reader_slots import ReaderSlots
from atoll_server.service import fragment_replies
from prometheus_client import CollectorRegistry, Counter


def counted() -> Counter:
    return Counter("limited", "calls", ["limit"], registry=CollectorRegistry())


def test_readers_beyond_the_limit_are_refused_and_counted():
    limited = counted()
    slots = ReaderSlots(watches=2, reads=1, max_wait_s=0.01, limited=limited)
    with slots.watching(), slots.watching(), pytest.raises(Refused, match="2 readers already watch") as refused:
        slots.watching().__enter__()
    assert refused.value.status is Status.RESOURCE_EXHAUSTED
    with slots.watching():
        pass
    assert limited.labels("readers")._value.get() == 1
    assert {"readers", "reads"} < set(LIMITS)


def test_a_stream_waits_for_a_slot_and_is_refused_after_a_while():
    async def story() -> list[str]:
        limited, told = counted(), list[str]()
        slots = ReaderSlots(watches=1, reads=1, max_wait_s=0.2, limited=limited)
        first, second = asyncio.Event(), asyncio.Event()

        async def read(name: str, until: asyncio.Event) -> None:
            async with slots.reading():
                told.append(name)
                await until.wait()

        tasks = [asyncio.create_task(read("one", first)), asyncio.create_task(read("two", second))]
        await asyncio.sleep(0)
        first.set()
        await tasks[0]
        with pytest.raises(Refused, match="readers already fetch with 1 streams"):
            await read("three", second)
        second.set()
        await tasks[1]
        assert limited.labels("reads")._value.get() == 1
        return told

    assert asyncio.run(story()) == ["one", "two"]


def test_only_a_few_frames_are_encoded_for_readers_at_the_same_time(monkeypatch):
    running, most = 0, 0

    async def in_thread(*_: object) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return b"payload"

    async def story() -> int:
        monkeypatch.setattr(fragment_replies.asyncio, "to_thread", in_thread)
        spans = [SimpleNamespace(index=index, length=1) for index in range(5)]
        fragment, state = SimpleNamespace(place=SimpleNamespace(frames=spans)), SimpleNamespace(theta_pub=None)
        encoding, sizes = asyncio.Semaphore(2), list[int]()

        async def read() -> None:
            sent = lambda size, _: sizes.append(size)  # noqa: E731
            async for _ in fragment_replies.whole_frames(fragment, state, range(5), sent, encoding, compressed=True):
                pass

        await asyncio.gather(*(read() for _ in range(8)))
        return len(sizes)

    assert asyncio.run(story()) == 40
    assert most == 2
