"""Keeps the messages that wait to be sent to one attached shard."""

from __future__ import annotations

import asyncio

from atoll_wire import shards_pb2 as sh


class Outbox:
    """Messages that wait to be sent to one shard. A newer message about the same thing replaces an older one.

    The newer message also takes the older one's place and number. Otherwise, a shard could confirm a number although
    the message with that number was replaced and its replacement was not sent yet. confirmed: number of the newest
    message that the shard has made durable.
    """

    def __init__(self) -> None:
        self._waiting: dict[object, sh.FromRegistrar] = {}
        self._number = 0  # number of the newest message
        self.confirmed = 0
        self._wake = asyncio.Event()
        self.ended = False

    def put(self, about: object, message: sh.FromRegistrar) -> None:
        """Adds a message. about: what the message is about."""
        if (older := self._waiting.get(about)) is not None:
            message.sequence = older.sequence
        else:
            self._number += 1
            message.sequence = self._number
        self._waiting[about] = message
        self._wake.set()

    @property
    def newest(self) -> int:
        """The sequence number of the newest message."""
        return self._number

    def end(self) -> None:
        """Ends the call that sends these messages."""
        self.ended = True
        self._wake.set()

    async def next(self) -> sh.FromRegistrar | None:
        """Returns the oldest message, or None after `end`."""
        while not self._waiting and not self.ended:
            self._wake.clear()
            await self._wake.wait()
        if self.ended:
            return None
        return self._waiting.pop(next(iter(self._waiting)))
