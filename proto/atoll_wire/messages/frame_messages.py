"""Reads and writes the frames of `PushRequest` and `FetchReply` by hand, without copies.

In both message types, field 2 contains `Frame`s. The sender encodes a frame once for all receivers, in protobuf's
format. Encoded frames can be concatenated into one message. This module reads such messages as views of their bytes,
and leaves messages in any other form to protobuf.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.codec.checksums import Payload
from atoll_wire.messages.message_parts import PART_BYTES, REPLY_BYTES, MessageAssembler, split

TENSORS = 100_000  # limit on tensors in one JoinRequest
FRAMES_PER_MESSAGE = 4  # limit on frames in one message; each message has a fixed cost
FRAME = 0x12  # field 2, a message: `frames` of PushRequest and FetchReply
INDEX, CRC32C, PAYLOAD = 0x08, 0x15, 0x1A  # fields 1 to 3 of Frame: a varint, four bytes, bytes
OUTER, READER = "Outer", "Reader"  # names of the services
CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class WireFrame:
    """A frame like `pb.Frame`, whose payload is a view of the received message."""

    index: int
    crc32c: int
    payload: Payload


class FrameBatch(list[WireFrame]):
    """The frames of one message, and the message's bytes, which a front forwards unchanged."""

    __slots__ = ("message",)

    def __init__(self, frames: list[WireFrame], message: bytes) -> None:
        super().__init__(frames)
        self.message = message


Sent: TypeAlias = bytes | Message | FrameBatch  # bytes are results of `encode`
Pushed: TypeAlias = pb.PushRequest | FrameBatch
Fetched: TypeAlias = pb.FetchReply | FrameBatch


@dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A message with one frame, in pieces, which are only joined to be sent: a copy would take as much memory again."""

    pieces: tuple[Payload, ...]
    size_bytes: int

    @classmethod
    def of(cls, index: int, crc32c: int, payload: Sequence[Payload]) -> EncodedFrame:
        """payload: the frame's payload, in pieces."""
        size = sum(map(len, payload))
        number = bytes((INDEX,)) + _varint(index) if index else b""
        inside = b"".join((number, bytes((CRC32C,)), CHECKSUM.pack(crc32c), bytes((PAYLOAD,)), _varint(size)))
        head = b"".join((bytes((FRAME,)), _varint(len(inside) + size), inside))
        return cls((head, *payload), len(head) + size)


def encode(index: int, crc32c: int, payload: Payload) -> bytes:
    """Returns a message with one frame, valid as PushRequest and as FetchReply. Such messages can be concatenated."""
    return b"".join(EncodedFrame.of(index, crc32c, (payload,)).pieces)


def serialise(message: Sent) -> bytes:
    """Returns the bytes of a message. gRPC serialises replies with this function."""
    if isinstance(message, FrameBatch):
        return message.message
    return message if isinstance(message, bytes) else message.SerializeToString()


def push_request(message: bytes) -> Pushed:
    """Parses a PushRequest in place of gRPC's deserialiser. Raises DecodeError for a malformed message."""
    return _read(message) or pb.PushRequest.FromString(_few_fields(message))


def fetch_reply(message: bytes) -> Fetched:
    """Parses a FetchReply in place of gRPC's deserialiser. Raises DecodeError for a malformed message."""
    return _read(message) or pb.FetchReply.FromString(_few_fields(message))


def frames_in(message: Pushed | Fetched) -> Sequence[WireFrame | pb.Frame]:
    """Returns the frames of a message, whether this module or protobuf parsed it."""
    return message if isinstance(message, list) else message.frames


def count_fitting(sizes: Iterable[int], most: int = FRAMES_PER_MESSAGE) -> int:
    """Returns how many of the next frames fit into a message of one piece; at least one. sizes: sizes of the frames."""
    count = total = 0
    for size in islice(sizes, most):
        total += size
        if count and total > PART_BYTES:
            break
        count += 1
    return count


def _read(message: bytes) -> FrameBatch | None:
    """Reads frames in the form of `encode`. Returns None for other forms or for more than FRAMES_PER_MESSAGE frames."""
    found, at = list[WireFrame](), 0
    try:
        while at < len(message) and len(found) < FRAMES_PER_MESSAGE:
            frame, at = _frame(message, at)
            found.append(frame)
    except (_OtherForm, IndexError, struct.error):
        return None
    return FrameBatch(found, message) if found and at == len(message) else None


def join_request(message: bytes) -> pb.JoinRequest:
    """Parses a JoinRequest in place of gRPC's deserialiser.

    Raises DecodeError for a malformed message, and for more than TENSORS tensors.
    """
    most = TENSORS + len(pb.JoinRequest.DESCRIPTOR.fields)
    return pb.JoinRequest.FromString(message if len(message) < 2 * most else _few_fields(message, most))


def _few_fields(message: bytes, most: int = FRAMES_PER_MESSAGE + 1) -> bytes:
    """Returns the message unchanged.

    Raises DecodeError for more than `most` fields, because protobuf would allocate an object for each field.
    """
    at, count = 0, 0
    while at < len(message):
        count += 1
        try:
            tag, at = _length(message, at)
            at = _after(message, at, tag & 7)
        except (_OtherForm, IndexError) as error:
            raise DecodeError("the message is neither a Join nor a message with frames") from error
        if count > most:
            raise DecodeError(f"the message has more than {most} frames, tensors or other fields")
    return message


def _after(message: bytes, at: int, kind: int) -> int:
    """Returns the offset after a field's value. kind: protobuf's wire type."""
    match kind:
        case 0:
            return _length(message, at)[1]
        case 1:
            return at + 8
        case 2:
            length, at = _length(message, at)
            return at + length
        case 5:
            return at + 4
    raise _OtherForm  # groups are deprecated in protobuf


def _frame(message: bytes, at: int) -> tuple[WireFrame, int]:
    """Returns the frame at an offset, and the offset after it."""
    inside, at = _length(message, _tag(message, at, FRAME))
    end, index = at + inside, 0
    if message[at] == INDEX:
        index, at = _length(message, at + 1)
    at = _tag(message, at, CRC32C)
    [crc] = CHECKSUM.unpack_from(message, at)
    length, at = _length(message, _tag(message, at + CHECKSUM.size, PAYLOAD))
    if at + length != end or end > len(message):
        raise _OtherForm
    return WireFrame(index, crc, memoryview(message)[at:end]), end


class _OtherForm(Exception):  # noqa: N818 - not an error
    """The message is not in the form of `encode`. protobuf may still be able to parse it."""


def _tag(message: bytes, at: int, tag: int) -> int:
    """Returns the offset after a field's tag."""
    if message[at] != tag:
        raise _OtherForm
    return at + 1


def _length(message: bytes, at: int) -> tuple[int, int]:
    """Returns a varint of at most 28 bits, and the offset after it."""
    value = 0
    for shift in range(0, 28, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _OtherForm


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


READERS = {"Push": push_request, "Join": join_request}  # deserialisers of requests, by method


class _Pushing:
    """A call to Push that cuts its requests into pieces."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - gRPC's
        self._call = call

    async def write(self, message: Sent) -> None:
        """Sends a message, in one or more pieces."""
        for piece in split(serialise(message)):
            await self._call.write(piece)

    def __aiter__(self) -> AsyncIterator[pb.PushReply]:
        replies: AsyncIterator[pb.PushReply] = self._call.__aiter__()
        return replies

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest is gRPC's
        return getattr(self._call, name)


class _Fetching:
    """A call to Fetch that joins its replies from pieces."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - gRPC's
        self._call = call
        self._pieces = MessageAssembler(REPLY_BYTES)

    async def read(self) -> Any:  # noqa: ANN401 - a reply, or gRPC's EOF
        """Returns the next reply, joined from its pieces. Returns gRPC's EOF at the end."""
        while (raw := await self._call.read()) is not grpc.aio.EOF:
            if (whole := self._pieces.take(raw)) is not None:
                return fetch_reply(whole)
        return raw

    def __aiter__(self) -> _Fetching:
        return self

    async def __anext__(self) -> Fetched:
        async for raw in self._call:
            if (whole := self._pieces.take(raw)) is not None:
                return fetch_reply(whole)
        raise StopAsyncIteration

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest is gRPC's
        return getattr(self._call, name)


class FrameStub(rpc.OuterStub):
    """The generated stubs of Outer and Reader, with variants of Push, Fetch, Read and Join for large messages."""

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        """metadata: metadata of readers' calls."""
        super().__init__(channel)  # type: ignore[no-untyped-call]
        push: Any = channel.stream_stream("/atoll.v1.Outer/Push", response_deserializer=pb.PushReply.FromString)
        fetch: Any = channel.unary_stream("/atoll.v1.Outer/Fetch", request_serializer=pb.FetchRequest.SerializeToString)
        read: Any = channel.unary_stream("/atoll.v1.Reader/Read", request_serializer=pb.ReadRequest.SerializeToString)
        join: Any = channel.stream_unary("/atoll.v1.Outer/Join", response_deserializer=pb.JoinReply.FromString)
        self.Push: Any = lambda **how: _Pushing(push(**how))
        self.Fetch: Any = lambda request, **how: _Fetching(fetch(request, **how))
        self.Read: Any = lambda request, **how: _Fetching(read(request, metadata=metadata, **how))
        readers = rpc.ReaderStub(channel)  # type: ignore[no-untyped-call]
        self.Describe: Any = partial(readers.Describe, metadata=metadata)
        self.Watch: Any = partial(readers.Watch, metadata=metadata)
        self.Join: Any = lambda request, **how: join(split(request.SerializeToString()), **how)


def serve(servicer: rpc.OuterServicer | rpc.ReaderServicer, server: grpc.aio.Server, service: str = OUTER) -> None:
    """Adds a service to a server, with this module's readers and writers. service: OUTER or READER.

    Call this instead of the generated function. If a server has both handlers, gRPC's version decides which one runs.
    """
    handlers = {}
    for method in pb.DESCRIPTOR.services_by_name[service].methods:
        kind = "_".join("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
        read = READERS.get(method.name) or GetMessageClass(method.input_type).FromString
        made = getattr(grpc, f"{kind}_rpc_method_handler")(getattr(servicer, method.name), read, serialise)
        handlers[method.name] = made
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"atoll.v1.{service}", handlers),))
