"""A relay between a learner and its core, which a test can delay, cut, or make silent."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator


class Relay:
    """Relays the bytes of TCP connections.

    delay_s: one-way delay of every byte. most_down: resets a connection after this number of bytes to the learner; 0
    for no limit.
    """

    def __init__(self, target: str, delay_s: float = 0.0, most_down: int = 0) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._delay_s, self._most_down = (host, int(port)), delay_s, most_down
        self._travelling: deque[tuple[float, socket.socket, bytes]] = deque()  # time of arrival, sender's socket, data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._place = self._listener.getsockname()
        self.address = f"127.0.0.1:{self._place[1]}"
        self.bytes_up, self.accepted, self.spent = 0, 0, 0  # spent: connections that carried most_down
        self._down: dict[socket.socket, int] = {}  # learner's socket -> bytes to it
        self._stalled: set[socket.socket] = set()  # the learner's sockets of silent connections
        self._silent, self.silenced = False, 0  # whether new connections are silent; number of these
        self._peer: dict[socket.socket, socket.socket] = {}
        self._up: set[socket.socket] = set()  # the learner's sockets
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stall(self) -> None:
        """Silences all current connections: bytes are lost, but no side sees an error."""
        with self._lock:
            for end in list(self._peer):
                self._selector.unregister(end)
                self._stalled.add(end)
            self._peer.clear()

    def silence(self, *, silent: bool = True) -> None:
        """Silences all current connections and, until `silence(silent=False)`, new ones, as a route without a way back.

        Connections that are silent stay silent.
        """
        self.stall()
        self._silent = silent

    def reset(self) -> None:
        """Resets all connections. New ones are accepted."""
        with self._lock:
            for end in list(self._peer):
                self._drop(end)

    def cut(self) -> None:
        """Resets all connections, and refuses new ones."""
        with self._lock:
            self._selector.unregister(self._listener)
            self._listener.close()
        self.reset()

    def reconnect(self) -> None:
        """Accepts connections again after `cut`, on the same port."""
        with self._lock:
            self._listener = socket.create_server(self._place)
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _run(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select(min(0.05, self._delay_s / 10 or 0.05)):
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._peer:
                        self._receive(key.fileobj)
            with self._lock:
                while self._travelling and self._travelling[0][0] <= time.monotonic():
                    _, end, data = self._travelling.popleft()
                    self._pass_on(end, data)

    def _accept(self) -> None:
        learner, _ = self._listener.accept()
        if self._silent:
            self.silenced += 1
            self._stalled.add(learner)
            return
        try:
            core = socket.create_connection(self._target)
        except OSError:  # the core is restarting; the learner must see an error, too
            learner.close()
            return
        self.accepted += 1
        self._up.add(learner)
        for end, other in ((learner, core), (core, learner)):
            self._peer[end] = other
            self._selector.register(end, selectors.EVENT_READ)

    def _receive(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(end)
        elif self._delay_s:
            self._travelling.append((time.monotonic() + self._delay_s, end, data))
        else:
            self._pass_on(end, data)

    def _pass_on(self, end: socket.socket, data: bytes) -> None:
        other = self._peer.get(end)
        if other is None:
            return
        try:
            other.sendall(data)
        except OSError:
            self._drop(end)
            return
        if end in self._up:
            self.bytes_up += len(data)
            return
        self._down[other] = self._down.get(other, 0) + len(data)
        if self._most_down and self._down[other] >= self._most_down:
            self.spent += 1
            self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        other = self._peer.pop(end, None)
        if other is None:
            return
        self._peer.pop(other, None)
        for each in (end, other):
            self._selector.unregister(each)
            each.close()

    def end(self) -> None:
        self._ending = True
        self._thread.join()
        for each in (*self._peer, *self._stalled):
            each.close()
        self._listener.close()
        self._selector.close()


@contextlib.contextmanager
def relay(target: str, delay_s: float = 0.0, most_down: int = 0) -> Iterator[Relay]:
    made = Relay(target, delay_s, most_down)
    try:
        yield made
    finally:
        made.end()
