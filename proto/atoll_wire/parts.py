"""Large messages as several small ones, so that what is half sent is little, whoever sends it.

gRPC keeps what it has of a message until all of it is there. So no message is larger than `MESSAGE_BYTES` on its way
to a server, or from one: a larger JoinRequest, PushRequest or FetchReply is cut, and its pieces travel in the fields
`part` and `more` of messages of its own kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

PART_BYTES = 264 << 10  # a frame in int4, the usual codec, is not cut
MESSAGE_BYTES = PART_BYTES + (8 << 10)  # the largest that a server takes
REPLY_BYTES = 16 << 20  # the largest that a server sends, whole or in pieces: frames of float32 have 2 MiB each
PART, MORE = 0x72, b"\x78\x01"  # field 14, bytes; field 15, true


def split(message: bytes) -> Iterator[bytes]:
    """As it is sent."""
    if len(message) <= PART_BYTES:
        yield message
        return
    view = memoryview(message)
    for at in range(0, len(message), PART_BYTES):
        piece = view[at : at + PART_BYTES]
        more = MORE if at + PART_BYTES < len(message) else b""
        yield b"".join((more, bytes((PART,)), _varint(len(piece)), piece))


class Pieces:
    """What has come of one message. most_bytes: that all of it may have."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._came = list[memoryview]()
        self.size_bytes = 0

    def take(self, message: bytes) -> bytes | None:
        """The whole message, once it is here. Raises DecodeError for what is too much, or no piece after one."""
        more = message.startswith(MORE)
        at = len(MORE) if more else 0
        if message[at : at + 1] != bytes((PART,)):
            if more or self._came:
                raise DecodeError("a piece of a message is followed by no other")
            return message
        piece = _content(message, at + 1)
        self.size_bytes += len(piece)
        if self.size_bytes > self._most_bytes:
            raise DecodeError(f"the pieces of a message have more than {self._most_bytes} bytes in all")
        self._came.append(piece)
        if more:
            return None
        whole = b"".join(self._came)
        self._came = []
        self.size_bytes = 0
        return whole

    @property
    def waits(self) -> bool:
        """Whether some of a message is here."""
        return bool(self._came)


def _content(message: bytes, at: int) -> memoryview:
    """Of a field that goes on to the message's end; `at`: where its length begins."""
    length = shift = 0
    for at in range(at, min(at + 4, len(message))):  # noqa: B020, PLR1704 - where it ends is used below
        length |= (message[at] & 0x7F) << shift
        shift += 7
        if message[at] < 0x80:
            break
    else:
        raise DecodeError("a piece of a message has no length")
    if not 0 < length == len(message) - at - 1:
        raise DecodeError("a piece of a message does not have its length")
    return memoryview(message)[at + 1 :]


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
