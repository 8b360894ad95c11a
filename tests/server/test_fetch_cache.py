"""A front's cache stores each item once, in limited memory, and never serves it under another key."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from atoll_server.front.fetch_cache import CachedFetch, CacheFullError, CacheKey, CorruptFetchError, FetchCache
from atoll_server.upstream.known_sessions import KNOWN_S, MOST, KnownSessions
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import UPDATES_KEPT
from atoll_wire.messages import frame_messages

SIZE = 100


def place(version: int = 1, fragment: int = 0) -> CacheKey:
    return CacheKey("run", 1, fragment, False, version)


def header(version: int = 1, count: int = 2, crc: int = 7) -> pb.FetchHeader:
    return pb.FetchHeader(version=version, frames=count, size_bytes=SIZE, crc32c=crc)


def frame(index: int) -> pb.Frame:
    return pb.Frame(index=index, crc32c=5, payload=bytes([index]) * 10)


def fill(cache: FetchCache, where: CacheKey) -> CachedFetch:
    item = cache.begin(where, 2)
    item.claim(range(2))
    for index in range(2):
        item.took(header(where.version), frame(index))
    return item


def read(item: CachedFetch, indices: Sequence[int] = range(2)) -> list[bytes]:
    async def all_of() -> list[bytes]:
        return [message async for message in item.read(indices)]

    return asyncio.run(all_of())


def test_received_frames_can_be_read_repeatedly():
    item = fill(cache := FetchCache(1000), place())
    assert cache.find(place()) is item
    expected = [frame_messages.encode(n, 5, frame(n).payload) for n in range(2)]
    assert read(item) == [b"".join(expected)]
    assert read(item, [1]) == expected[1:]


def test_a_reader_waits_for_missing_frames_and_hears_of_a_failure():
    async def both() -> tuple[list[bytes], BaseException | None]:
        item = FetchCache(1000).begin(place(), 2)
        assert item.claim(range(2)) == [0, 1]

        async def all_of() -> list[bytes]:
            return [message async for message in item.read([0, 1])]

        first, second = asyncio.create_task(all_of()), asyncio.create_task(all_of())
        await asyncio.sleep(0)
        item.took(header(), frame(1))
        item.took(header(), frame(0))
        told = await first
        await second
        broken = FetchCache(1000).begin(place(2), 2)
        broken.claim([1])
        waiting = asyncio.create_task(broken.begun())
        await asyncio.sleep(0)
        broken.failed([1], CorruptFetchError)
        await asyncio.wait([waiting])
        return told, waiting.exception()

    told, error = asyncio.run(both())
    assert b"".join(told) == b"".join(frame_messages.encode(n, 5, frame(n).payload) for n in range(2))
    assert isinstance(error, CorruptFetchError)


def test_a_cut_fetch_keeps_its_frames_and_the_next_one_fetches_the_others():
    item = (cache := FetchCache(1000)).begin(place(), 3)
    assert item.claim([0, 1]) == [0, 1]
    item.took(header(count=3), frame(0))
    assert item.claim(range(3)) == [2], "only missing frames may be fetched again"
    item.failed([0, 1], ConnectionError)
    with pytest.raises(ConnectionError):
        read(item, [1])
    assert cache.find(place()) is item
    assert item.claim(range(3)) == [1]
    item.took(header(count=3), frame(1))
    item.took(header(count=3), frame(2))
    assert b"".join(read(item, range(3))) == b"".join(frame_messages.encode(n, 5, frame(n).payload) for n in range(3))
    assert item.idle


def test_a_reader_of_a_cut_fetch_continues_with_the_next_fetch():
    async def both() -> bytes:
        item = FetchCache(1000).begin(place(), 2)
        item.claim([0])
        item.took(header(), frame(0))
        item.claim([1])
        reading = asyncio.create_task(anext(aiter(item.read([1]))))
        await asyncio.sleep(0)
        item.failed([1], ConnectionError)
        assert item.claim([1]) == [1], "the next fetch must claim the frame before the reader wakes"
        await asyncio.sleep(0)
        item.took(header(), frame(1))
        return await reading

    assert asyncio.run(both()) == frame_messages.encode(1, 5, frame(1).payload)


def test_a_frame_of_another_version_is_not_accepted():
    item = FetchCache(1000).begin(place(), 2)
    with pytest.raises(CorruptFetchError):
        item.took(header(version=2), frame(0))
    item.took(header(), frame(0))
    with pytest.raises(CorruptFetchError):
        item.took(header(crc=8), frame(1))


def test_a_front_keeps_as_many_updates_per_fragment_as_a_core():
    cache = FetchCache(1000 * SIZE)
    for version in range(1, 101):
        for fragment in range(2):
            fill(cache, place(version, fragment))
    found = [(v, f) for v in range(1, 101) for f in range(2) if cache.find(place(v, f)) is not None]
    assert found == [(v, f) for v in range(101 - UPDATES_KEPT, 101) for f in range(2)]
    assert cache.size_bytes == 2 * UPDATES_KEPT * SIZE


def test_a_read_can_finish_after_many_newer_versions():
    async def slowly() -> list[bytes]:
        cache = FetchCache(1000 * SIZE)
        item = cache.begin(place(1), 2)
        item.claim(range(2))
        item.took(header(), frame(0))
        reading = item.read(range(2))
        read = [await anext(reading)]
        for version in range(2, 2 + UPDATES_KEPT):
            fill(cache, place(version))
        assert cache.find(place(1)) is None
        item.took(header(), frame(1))
        return read + [message async for message in reading]

    assert asyncio.run(slowly()) == [frame_messages.encode(n, 5, frame(n).payload) for n in range(2)]


def test_the_least_recently_used_item_is_dropped_first_and_items_in_use_stay():
    cache = FetchCache(3 * SIZE)
    items = [fill(cache, place(version)) for version in (1, 2, 3)]
    assert cache.size_bytes == 3 * SIZE
    cache.find(place(1))
    fill(cache, place(4))
    assert cache.find(place(2)) is None, "the least recently used item must go"
    assert cache.find(place(1)) is items[0]
    assert cache.size_bytes == 3 * SIZE
    for version in (1, 3, 4):
        cache.find(place(version)).readers += 1
    with pytest.raises(CacheFullError):
        fill(cache, place(5))


def test_an_item_larger_than_the_cache_is_not_stored():
    with pytest.raises(CacheFullError):
        fill(FetchCache(SIZE - 1), place())


def test_a_complete_session_is_known_for_some_time_after_the_cores_answer():
    sessions = KnownSessions()
    session = pb.Session(run="r", learner="a", incarnation=1, generation=1, token=b"t")
    assert not sessions.known(session, 0.0)
    sessions.answered(session, 0.0)
    assert sessions.known(session, KNOWN_S - 0.1)
    assert not sessions.known(session, KNOWN_S)
    for change in ({"token": b"u"}, {"generation": 2}, {"run": "s"}, {"incarnation": 2}, {"learner": "b"}):
        other = pb.Session(run="r", learner="a", incarnation=1, generation=1, token=b"t")
        for name, value in change.items():
            setattr(other, name, value)
        assert not sessions.known(other, 0.0), change
    sessions.refused(session)
    assert not sessions.known(session, 0.1)


def test_the_number_of_sessions_is_limited():
    sessions = KnownSessions()
    for number in range(MOST + 10):
        sessions.answered(pb.Session(learner=str(number)), 0.0)
    assert not sessions.known(pb.Session(learner="0"), 0.0)
    assert sessions.known(pb.Session(learner=str(MOST + 9)), 0.0)


def test_a_returned_shard_removes_only_its_own_items():
    cache = FetchCache(1000)
    mine, other = place(), place(fragment=1)
    fill(cache, mine)
    fill(cache, other)
    cache.clear([0, 2])
    assert cache.find(mine) is None
    assert cache.find(other) is not None
    cache.clear(None)
    assert cache.find(other) is None
