"""Writes gRPC's bytes without a client library, to send incomplete messages."""

from __future__ import annotations

import select
import socket
import struct
import time

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
LARGEST = 16_384  # limit on a frame's size in bytes
DEFAULT_WINDOW = 65_535


class Raw:
    """One HTTP/2 connection. ended: streams that the server ended."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._inward, self._stream = b"", -1
        self._initial, self._window = DEFAULT_WINDOW, DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        self._left: dict[int, memoryview] = {}  # data that waits for a flow-control window
        self.sent_bytes, self.ended, self.closed = 0, set[int](), False
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, b""))

    def call(self, path: str, begun: bytes) -> int:
        """Begins a call. `pump` sends `content`, a part of its messages."""
        self._stream += 2
        named = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        named |= {"content-type": "application/grpc", "te": "trailers"}
        block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in named.items())
        self._socket.sendall(_frame(HEADERS, 4, self._stream, block))
        self._windows[self._stream], self._left[self._stream] = self._initial, memoryview(begun)
        return self._stream

    def pump(self, seconds: float) -> None:
        """Sends and receives for at most this number of seconds."""
        until = time.monotonic() + seconds
        while not self.closed and (left_s := until - time.monotonic()) > 0:
            self._send()
            if select.select([self._socket], [], [], min(left_s, 0.02))[0]:
                self._hear()

    def close(self) -> None:
        self._socket.close()

    def _send(self) -> None:
        for stream, left in self._left.items():
            size = min(len(left), self._windows[stream], self._window, LARGEST)
            if size > 0 and stream not in self.ended:
                self._socket.sendall(_frame(DATA, 0, stream, left[:size]))
                self._left[stream] = left[size:]
                self._windows[stream] -= size
                self._window -= size
                self.sent_bytes += size

    def _hear(self) -> None:
        try:
            came = self._socket.recv(1 << 16)
        except ConnectionError:
            came = b""
        self.closed = not came
        self._inward += came
        while len(self._inward) >= 9 and len(self._inward) >= 9 + (size := int.from_bytes(self._inward[:3], "big")):
            kind, flags, stream = struct.unpack(">BBI", self._inward[3:9])
            body, self._inward = self._inward[9 : 9 + size], self._inward[9 + size :]
            self._take(kind, flags, stream, body)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & 1:
            for number, value in struct.iter_unpack(">HI", body):
                if number == 4:
                    self._windows = {each: size + value - self._initial for each, size in self._windows.items()}
                    self._initial = value
            self._socket.sendall(_frame(SETTINGS, 1, 0, b""))
        elif kind == PING and not flags & 1:
            self._socket.sendall(_frame(PING, 1, 0, body))
        elif kind == WINDOW:
            [more] = struct.unpack(">I", body)
            if stream:
                self._windows[stream] = self._windows.get(stream, 0) + more
            else:
                self._window += more
        elif kind == RESET or (kind == HEADERS and flags & 1):
            self.ended.add(stream)
        elif kind == GOAWAY:
            self.closed = True


def begun(size: int, missing: int = 10) -> bytes:
    """Returns the beginning of a gRPC-framed message that declares this size."""
    return b"\x00" + struct.pack(">I", size) + bytes(size - missing)


def whole(message: bytes) -> bytes:
    """Returns a gRPC-framed message."""
    return b"\x00" + struct.pack(">I", len(message)) + message


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + body


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()
