"""The retry loop: its waits, their length, and its end."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from atoll.agent.core_view import CoreView, FragmentTrack, ShardView
from atoll.errors import LearnerError
from atoll.transfers import retry_loop
from atoll.transfers.call_errors import FIRST_BACKOFF_S, Remedy
from atoll.transfers.retry_loop import Failure, retry
from atoll_wire import outer_pb2 as pb
from atoll_wire.connections.calls import LinkLost
from atoll_wire.connections.link import ATOLL_STATUS


def said(code: grpc.StatusCode, *mark: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*mark), "why")


class Tries:
    """Attempts, each of which takes the next item of `events`: an error or a result.

    bytes: received before the attempt.
    """

    def __init__(self, *events: Exception | bool, came: tuple[int, ...] = (), acts: bool = False) -> None:
        self._events, self._came, self._acts = list(events), [0, *came], acts
        self.core, shard = CoreView(SimpleNamespace()), ShardView("", SimpleNamespace())
        self.track = FragmentTrack(SimpleNamespace(), shard)
        shard.joined(pb.Session())
        self.wanted, self.pauses, self.failures = True, list[float](), list[Failure]()

    async def _once(self) -> bool:
        event = self._events.pop(0)
        self._came[:-1] = self._came[1:]
        if isinstance(event, Exception):
            raise event
        return event

    def _failed(self, failure: Failure) -> bool:
        self.failures.append(failure)
        return self._acts

    def run(self, monkeypatch) -> Tries:
        sleep = asyncio.sleep

        async def pause(seconds: float) -> None:
            self.pauses.append(seconds)
            await sleep(0)

        monkeypatch.setattr(retry_loop.asyncio, "sleep", pause)
        loop = retry(
            self.core,
            self.track,
            lambda: self.wanted,
            self._once,
            self._failed,
            random.Random(1),
            lambda: self._came[0],
        )
        asyncio.run(asyncio.wait_for(loop, 10))
        assert not self._events
        return self


AWAY = said(grpc.StatusCode.UNAVAILABLE)


def test_pauses_grow_with_consecutive_failures_of_any_kind(monkeypatch):
    tries = Tries(AWAY, False, AWAY, False, True).run(monkeypatch)
    assert [each.before for each in tries.failures] == [0, 2]
    for failures, pause_s in enumerate(tries.pauses):
        assert 0.5 * FIRST_BACKOFF_S * 2**failures <= pause_s <= FIRST_BACKOFF_S * 2**failures
    assert len(tries.pauses) == 4


def test_a_failed_link_is_not_waited_for(monkeypatch):
    tries = Tries(LinkLost("given up"), LinkLost("given up"), True).run(monkeypatch)
    assert (tries.pauses, tries.failures) == ([], [])


def test_after_a_remedy_the_next_attempt_is_immediate(monkeypatch):
    assert Tries(AWAY, True, acts=True).run(monkeypatch).pauses == []


def test_a_failure_after_progress_counts_as_the_first(monkeypatch):
    tries = Tries(AWAY, AWAY, AWAY, True, came=(0, 5, 5)).run(monkeypatch)
    assert [each.before for each in tries.failures] == [0, 0, 1]


def test_only_a_refusal_of_a_core_or_front_ends_the_loop(monkeypatch):
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert Tries(said(denied), True).run(monkeypatch).failures[0].remedy is Remedy.TRY_AGAIN
    with pytest.raises(LearnerError, match="why"):
        Tries(said(denied, *ATOLL_STATUS)).run(monkeypatch)


def test_the_loop_ends_when_nothing_is_wanted_or_the_learner_leaves(monkeypatch):
    for change in ({"wanted": False}, {"leaving": True}):
        tries = Tries()
        tries.wanted = change.get("wanted", True)
        tries.core.leaving = change.get("leaving", False)
        tries.run(monkeypatch)
