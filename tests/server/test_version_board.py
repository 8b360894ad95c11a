"""A board announces each fragment's newest version to every reader, and remembers no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from atoll_server.rpc import version_board
from atoll_server.rpc.version_board import VersionBoard
from atoll_wire import outer_pb2 as pb


def version(fragment: int, number: int) -> pb.PublishedVersion:
    return pb.PublishedVersion(fragment=fragment, version=number, crc32c=number, frames=1)


def pairs(reply: pb.WatchReply) -> tuple[int, int, list[tuple[int, int]]]:
    return reply.shard, reply.log, sorted((each.fragment, each.version) for each in reply.versions)


async def heard(replies: AsyncGenerator[pb.WatchReply, None]) -> tuple[int, int, list[tuple[int, int]]]:
    return pairs(await asyncio.wait_for(anext(replies), 5))


def test_a_reader_gets_all_fragments_first_and_then_only_newer_versions():
    async def story() -> None:
        board = VersionBoard()
        board.show(0, 7, [version(0, 3), version(1, 4)])
        replies = board.watch()
        assert await heard(replies) == (0, 7, [(0, 3), (1, 4)])
        assert board.watching == 1
        board.show(0, 7, [version(1, 5)])
        board.show(0, 7, [version(1, 6), version(0, 2)])
        assert await heard(replies) == (0, 7, [(1, 6)]), "skipped and older versions must not be announced"
        board.show(2, 9, [version(8, 1)])
        assert await heard(replies) == (2, 9, [(8, 1)]), "another shard"
        assert board.newest(8).version == 1
        assert board.newest(5) is None
        await replies.aclose()
        assert board.watching == 0

    asyncio.run(story())


def test_a_new_log_is_announced_with_all_its_fragments_although_versions_are_lower():
    async def story() -> None:
        board = VersionBoard()
        board.show(0, 7, [version(0, 3), version(1, 4)])
        replies = board.watch()
        await heard(replies)
        board.show(0, 8, [version(0, 2), version(1, 4)])
        assert await heard(replies) == (0, 8, [(0, 2), (1, 4)])
        assert board.newest(0).version == 2

    asyncio.run(story())


def test_a_quiet_board_sends_heartbeats(monkeypatch):
    monkeypatch.setattr(version_board, "BEAT_S", 0.01)

    async def story() -> None:
        replies = VersionBoard().watch()
        assert [await heard(replies) for _ in range(3)] == [(0, 0, [])] * 3

    asyncio.run(story())
