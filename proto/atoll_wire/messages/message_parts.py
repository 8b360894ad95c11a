"""Cuts large messages into small ones, so that incomplete messages take little memory.

gRPC keeps the bytes of a message until the whole message has arrived. Servers therefore refuse messages larger than
`MESSAGE_BYTES`. A larger JoinRequest, PushRequest or FetchReply is cut into pieces. Each piece is sent in the fields
`part` and `more` of a message of the same type.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

PART_BYTES = 528 << 10  # one piece holds two frames in int4, the default codec
MESSAGE_BYTES = PART_BYTES + (8 << 10)  # the largest message that a server accepts by default
REPLY_BYTES = 16 << 20  # the largest reply, in one or more pieces: a float32 frame takes 2 MiB
PART, MORE = 0x72, b"\x78\x01"  # field 14, bytes; field 15, true


def split(message: bytes) -> Iterator[bytes]:
    """Yields the messages to send: the message itself, or its pieces of at most PART_BYTES."""
    if len(message) <= PART_BYTES:
        yield message
        return
    view = memoryview(message)
    for at in range(0, len(message), PART_BYTES):
        piece = view[at : at + PART_BYTES]
        more = MORE if at + PART_BYTES < len(message) else b""
        yield b"".join((more, bytes((PART,)), _varint(len(piece)), piece))


class MessageAssembler:
    """Joins the pieces of a message. most_bytes: limit on the whole message."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._came = list[memoryview]()
        self.size_bytes = 0

    def take(self, message: bytes) -> bytes | None:
        """Takes the next message or piece. Returns the whole message once it is complete, otherwise None.

        Raises DecodeError if the pieces exceed the limit, or if a message follows an unfinished one.
        """
        more = message.startswith(MORE)
        at = len(MORE) if more else 0
        if message[at : at + 1] != bytes((PART,)):
            if more or self._came:
                raise DecodeError("the next piece of a message is missing")
            return message
        piece = _content(message, at + 1)
        self.size_bytes += len(piece)
        if self.size_bytes > self._most_bytes:
            raise DecodeError(f"the pieces of a message have more than {self._most_bytes} bytes in total")
        self._came.append(piece)
        if more:
            return None
        whole = b"".join(self._came)
        self._came = []
        self.size_bytes = 0
        return whole

    @property
    def waits(self) -> bool:
        """Whether a message is incomplete."""
        return bool(self._came)


def _content(message: bytes, at: int) -> memoryview:
    """Returns the content of the last field of a message. at: offset of the field's length. Raises DecodeError."""
    length = shift = 0
    for at in range(at, min(at + 4, len(message))):  # noqa: B020, PLR1704 - its last value is used below
        length |= (message[at] & 0x7F) << shift
        shift += 7
        if message[at] < 0x80:
            break
    else:
        raise DecodeError("a piece of a message has no length")
    if not 0 < length == len(message) - at - 1:
        raise DecodeError("a piece of a message does not have its declared length")
    return memoryview(message)[at + 1 :]


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
