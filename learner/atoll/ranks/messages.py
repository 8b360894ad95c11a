"""Exchanges messages between the agents of a learner's ranks, through a store on rank 0.

Background threads must not make collective calls: the order of the calls would differ between ranks, and the ranks
would wait for each other forever. Messages go through a torch TCPStore instead, each under its own key.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

from torch.distributed import DistStoreError, TCPStore  # type: ignore[attr-defined]

from atoll.errors import LearnerError
from atoll.ranks.rank_group import RankGroup

CONNECT = timedelta(seconds=60)
FOREVER = timedelta(days=365)
END_S = 5.0  # limit on the wait for each thread, because the store of a lost rank 0 may not answer
LAST = b""  # the message that ends the reading thread


class RankMessages(Protocol):
    """Exchanges messages with the other ranks. rank: number of this rank. size: number of ranks."""

    rank: int
    size: int

    def send(self, to: int, message: bytes) -> None:
        """Sends a message to a rank without waiting. Messages from one rank to another arrive in order."""

    def begin(self, arrived: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        """Starts to receive messages.

        arrived: called with each message, on another thread.
        failed: called with the error if the connection to rank 0 is lost.
        """

    def end(self) -> None:
        """Stops sending and receiving. Messages that have not arrived yet may be lost."""


class StoreMessages:
    """Exchanges messages through a TCPStore on rank 0. All ranks create it together."""

    def __init__(self, rank: int, size: int, inbox: TCPStore, outbox: TCPStore, server: TCPStore | None) -> None:
        """inbox, outbox: two clients of the store, because a client blocks while it waits.

        server: the store on rank 0, and None on the other ranks.
        """
        self.rank, self.size = rank, size
        self._inbox, self._outbox, self._server = inbox, outbox, server
        self._waiting: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        self._threads = list[threading.Thread]()
        self._ended = False

    def send(self, to: int, message: bytes) -> None:
        self._waiting.put((to, message))

    def begin(self, arrived: Callable[[bytes], None], failed: Callable[[Exception], None]) -> None:
        for work in (lambda: self._read(arrived), self._write):
            thread = threading.Thread(target=self._guarded, args=(work, failed), name="atoll ranks", daemon=True)
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """Waits for both threads, because the interpreter cannot end a thread that waits in the store."""
        self._ended = True
        self.send(self.rank, LAST)
        self._waiting.put(None)
        for thread in self._threads:
            thread.join(END_S)

    def _guarded(self, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        try:
            work()
        except Exception as error:
            if not self._ended:
                failed(LearnerError(f"rank {self.rank} lost the connection to rank 0 ({error}): restart all ranks"))

    def _read(self, arrived: Callable[[bytes], None]) -> None:
        number = 0
        while True:
            key = f"{self.rank}/{number}"
            self._inbox.wait([key], FOREVER)
            message = self._inbox.get(key)
            self._inbox.delete_key(key)
            number += 1
            if message == LAST:
                return
            arrived(message)

    def _write(self) -> None:
        while (item := self._waiting.get()) is not None:
            to, message = item
            number = self._outbox.add(f"{to}/count", 1) - 1
            self._outbox.set(f"{to}/{number}", message)  # type: ignore[arg-type]  # TCPStore.set also accepts bytes


def messages(ranks: RankGroup) -> RankMessages | None:
    """Returns this rank's connection to the other ranks, or None for a single rank. All ranks call this together.

    Raises LearnerError if this rank cannot connect to rank 0.
    """
    if ranks.size == 1:
        return None
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=CONNECT) if ranks.is_leader else None
    port = int(ranks.gathered(str(server.port if server is not None else 0).encode())[0])
    try:
        inbox, outbox = (
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT) for _ in range(2)
        )
    except (DistStoreError, RuntimeError) as error:
        raise LearnerError(
            f"rank {ranks.rank} cannot reach rank 0 at {host}:{port} ({error}): set MASTER_ADDR to an address of "
            "rank 0 that all ranks reach"
        ) from error
    return StoreMessages(ranks.rank, ranks.size, inbox, outbox, server)
