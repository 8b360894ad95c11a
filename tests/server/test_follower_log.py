"""Notifications for followers: in order, bounded, and complete again after a gap."""

from __future__ import annotations

import asyncio

from atoll_server.ledger.rows import FateRow
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.shard.follower_log import FollowerLog
from atoll_server.telemetry import entries
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import Fate


def hear(log: FollowerLog, number: int | None = 0, sequence: int = 0, learner: str = "a") -> list[pb.Notification]:
    """Returns all notifications until the log closes.

    number: of the log that `position` belongs to; None for this log.
    """

    async def run() -> list[pb.Notification]:
        return [
            notification
            async for notification in log.follow(learner, log.number if number is None else number, sequence)
        ]

    return asyncio.run(run())


def made(count: int, limit: int = 100) -> FollowerLog:
    log = FollowerLog(limit, lambda: pb.FullState(versions={0: 7}))
    for cycle in range(1, count + 1):
        log.on(entries.RoundOpened(0, cycle), 0.0)
    log.close()
    return log


def test_an_unknown_position_gets_the_current_state_first():
    heard = hear(made(3))
    assert heard[0].WhichOneof("what") == "current"
    assert heard[0].current.versions == {0: 7}
    assert [h.WhichOneof("what") for h in heard] == ["current"]  # without notifications that it includes
    assert heard[0].sequence == 4


def test_a_known_position_continues_from_there():
    heard = hear(made(3), number=None, sequence=1)
    assert [h.opened.cycle for h in heard[:-1]] == [2, 3]
    assert heard[-1].WhichOneof("what") == "shutting_down"


def test_a_follower_too_far_behind_gets_the_state_instead():
    heard = hear(made(50, limit=10), number=None, sequence=5)
    assert [h.WhichOneof("what") for h in heard] == ["current"]


def test_a_position_of_another_process_or_of_the_future_is_unknown():
    assert hear(made(3), number=made(3).number, sequence=1)[0].WhichOneof("what") == "current"
    assert hear(made(3), number=None, sequence=99)[0].WhichOneof("what") == "current"


def test_receipts_go_to_their_own_learner_only():
    log = FollowerLog(100, pb.FullState)
    log.on(entries.PendingRefused(FateRow(ContributionKey("b", 1, 0, 1), Fate.REFUSED)), 0.0)
    log.on(entries.PendingRefused(FateRow(ContributionKey("a", 1, 0, 1), Fate.REFUSED)), 0.0)
    log.close()
    heard = hear(log, number=None, sequence=0)
    assert [h.receipt.learner for h in heard[:-1]] == ["a"]


def test_a_waiting_follower_is_woken_by_a_notification():
    async def run() -> list[str | None]:
        log = FollowerLog(10, pb.FullState)
        found: list[str | None] = []

        async def listen() -> None:
            async for notification in log.follow("a", 0, 0):
                found.append(notification.WhichOneof("what"))

        task = asyncio.create_task(listen())
        await asyncio.sleep(0)
        log.on(entries.RoundOpened(0, 1), 0.0)
        await asyncio.sleep(0)
        log.close()
        await asyncio.wait_for(task, 5)
        return found

    assert asyncio.run(run()) == ["current", "opened", "shutting_down"]
