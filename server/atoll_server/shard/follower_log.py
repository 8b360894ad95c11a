"""A bounded log of notifications for the learners with an open Follow call."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import assert_never

from atoll_wire import outer_pb2 as pb

from atoll_server.shard.contributions import receipt_of
from atoll_server.telemetry import entries
from atoll_server.telemetry.entries import Entry

BEAT_S = 1.0  # interval of empty notifications, which show that the core is alive


class FollowerLog:
    """The log for all Follow calls, each of which has its own position.

    A call that is too far behind gets the full state.
    """

    def __init__(self, limit: int, current: Callable[[], pb.FullState]) -> None:
        self.number = 1 + secrets.randbits(62)  # random: a counter would repeat after a restore from a backup
        self._current = current
        self._kept: deque[pb.Notification] = deque(maxlen=limit)
        self._sequence = 0
        self._changed = asyncio.Event()
        self.closed = False

    def on(self, entry: Entry, _now: float) -> None:
        """Adds a notification if learners need this entry."""
        match entry:
            case entries.RoundOpened(fragment, cycle):
                self._append(pb.Notification(opened=pb.RoundOpened(fragment=fragment, cycle=cycle)))
            case entries.PendingRefused(fate):
                self._append(pb.Notification(receipt=receipt_of(fate)))
            case entries.Published(merge, size_bytes, run_tokens, voided_tokens):
                published = pb.UpdatePublished(
                    fragment=merge.fragment,
                    version=merge.version,
                    size_bytes=size_bytes,
                    run_tokens=run_tokens,
                    voided_tokens=voided_tokens,
                )
                self._append(pb.Notification(published=published))
            case entries.PauseChanged(reason):
                self._append(pb.Notification(paused=pb.Paused(reason=reason)))
            case entries.Started() | entries.Restored() | entries.TakenUp() | entries.Trouble():
                pass
            case (
                entries.SnapshotTaken()
                | entries.SnapshotFailed()
                | entries.InitialParameters()
                | entries.InitialParametersRefused()
            ):
                pass
            case entries.OfLearners() | entries.OfFronts() | entries.OfCallers():
                pass
            case entries.UploadBegan() | entries.TurnedAway() | entries.Clamped() | entries.Acknowledged():
                pass
            case entries.ArrivalRefused():
                pass  # the contribution's stream gets the receipt
            case entries.Declined() | entries.RoundClosed() | entries.RoundLapsed():
                pass
            case entries.MergeComputed() | entries.Adopted():
                pass
            case _:
                assert_never(entry)

    def _append(self, notification: pb.Notification) -> None:
        """Assigns a position to a notification and wakes every Follow call."""
        self._sequence += 1
        notification.log, notification.sequence = self.number, self._sequence
        self._kept.append(notification)
        self._wake()

    def close(self) -> None:
        """Ends every Follow call."""
        self._append(pb.Notification(shutting_down=pb.ShuttingDown()))
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, learner: str, log: int, sequence: int) -> AsyncGenerator[pb.Notification, None]:
        """Yields notifications after a position. Yields the full state first if the position is unknown or too old.

        Between notifications, yields an empty notification every BEAT_S seconds, so that learners notice if the core
        hangs.
        """
        cursor = sequence if log == self.number and sequence <= self._sequence else -1
        while True:
            changed = self._changed  # read first, so that an entry appended meanwhile wakes this call
            oldest = self._sequence - len(self._kept)
            if cursor < oldest:
                cursor = self._sequence
                yield pb.Notification(log=self.number, sequence=cursor, current=self._current())
            while oldest <= cursor < self._sequence:
                notification = self._kept[cursor - self._sequence]
                cursor += 1
                if notification.WhichOneof("what") != "receipt" or notification.receipt.learner == learner:
                    yield notification
                oldest = self._sequence - len(self._kept)
            if cursor >= self._sequence:
                if self.closed:
                    return
                try:
                    async with asyncio.timeout(BEAT_S):
                        await changed.wait()
                except TimeoutError:
                    yield pb.Notification(log=self.number, sequence=cursor)
