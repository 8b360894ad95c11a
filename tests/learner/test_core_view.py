"""Failed calls that make a learner join again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from atoll.agent.core_view import ShardView
from atoll_wire import outer_pb2 as pb


def test_only_the_newest_session_can_be_lost():
    async def run() -> None:
        shard = ShardView("", SimpleNamespace())
        shard.joined(pb.Session(token=b"new"))
        shard.lose(pb.Session(token=b"old"))  # a call from before the last Join
        assert (shard.connected.is_set(), shard.lost.is_set()) == (True, False)
        shard.lose(shard.session)
        assert (shard.connected.is_set(), shard.lost.is_set()) == (False, True)

    asyncio.run(run())
