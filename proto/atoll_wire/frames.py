"""Frames in messages without copies: `PushRequest` and `FetchReply` as they are on the wire, written and read by hand.

Both hold `Frame`s as field 2. A frame is written as protobuf would write it, once for all who are sent it; one after
another they make a message. In that form it is read as views on its bytes; any other form that protobuf allows is left
to protobuf.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.checksums import Payload
from atoll_wire.parts import PART_BYTES, REPLY_BYTES, Pieces, split

TENSORS = 100_000  # in one JoinRequest at most
TOGETHER = 4  # frames in one message at most: it costs more than the bytes in it
FRAME = 0x12  # field 2, a message: of `frames` of PushRequest and of FetchReply
INDEX, CRC32C, PAYLOAD = 0x08, 0x15, 0x1A  # fields 1 to 3 of Frame: a varint, four bytes, bytes
SERVICE = "atoll.v1.Outer"
CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class WireFrame:
    """As `pb.Frame`; the payload is a view on the message that it came in."""

    index: int
    crc32c: int
    payload: Payload


class Batch(list[WireFrame]):
    """Those of one message, and the message itself, for who passes it on."""

    __slots__ = ("message",)

    def __init__(self, frames: list[WireFrame], message: bytes) -> None:
        super().__init__(frames)
        self.message = message


Sent: TypeAlias = bytes | Message | Batch  # bytes: what `encode` gave
Pushed: TypeAlias = pb.PushRequest | Batch
Fetched: TypeAlias = pb.FetchReply | Batch


def encode(index: int, crc32c: int, payload: Payload) -> bytes:
    """A message with a frame in it, or a part of one with more: a PushRequest as well as a FetchReply."""
    number = bytes((INDEX,)) + _varint(index) if index else b""
    inside = b"".join((number, bytes((CRC32C,)), CHECKSUM.pack(crc32c), bytes((PAYLOAD,)), _varint(len(payload))))
    return b"".join((bytes((FRAME,)), _varint(len(inside) + len(payload)), inside, payload))


def serialise(message: Sent) -> bytes:
    """For gRPC."""
    if isinstance(message, Batch):
        return message.message
    return message if isinstance(message, bytes) else message.SerializeToString()


def push_request(message: bytes) -> Pushed:
    """For gRPC. Raises DecodeError for what is no message."""
    return _read(message) or pb.PushRequest.FromString(_few_fields(message))


def fetch_reply(message: bytes) -> Fetched:
    """For gRPC. Raises DecodeError for what is no message."""
    return _read(message) or pb.FetchReply.FromString(_few_fields(message))


def frames_in(message: Pushed | Fetched) -> Sequence[WireFrame | pb.Frame]:
    """Those of a message, however it was read."""
    return message if isinstance(message, list) else message.frames


def fitting(sizes: Iterable[int], most: int = TOGETHER) -> int:
    """How many of the frames that come next go into one message: not more than it can carry in one piece, or one."""
    count = total = 0
    for size in islice(sizes, most):
        total += size
        if count and total > PART_BYTES:
            break
        count += 1
    return count


def _read(message: bytes) -> Batch | None:
    """Frames in the form that `encode` gives; None for anything else, and for more than there may be."""
    found, at = list[WireFrame](), 0
    try:
        while at < len(message) and len(found) < TOGETHER:
            frame, at = _frame(message, at)
            found.append(frame)
    except (_OtherForm, IndexError, struct.error):
        return None
    return Batch(found, message) if found and at == len(message) else None


def join_request(message: bytes) -> pb.JoinRequest:
    """For gRPC. Raises DecodeError for what is no message, or has more tensors than any may."""
    most = TENSORS + len(pb.JoinRequest.DESCRIPTOR.fields)
    return pb.JoinRequest.FromString(message if len(message) < 2 * most else _few_fields(message, most))


def _few_fields(message: bytes, most: int = TOGETHER + 1) -> bytes:
    """The same; DecodeError when it has more fields than `most`: protobuf makes an object of each."""
    at, count = 0, 0
    while at < len(message):
        count += 1
        try:
            tag, at = _length(message, at)
            at = _after(message, at, tag & 7)
        except (_OtherForm, IndexError) as error:
            raise DecodeError("not a message with frames, or a Join") from error
        if count > most:
            raise DecodeError(f"more than {most} frames, tensors or other fields")
    return message


def _after(message: bytes, at: int, kind: int) -> int:
    """What comes after a field's value. kind: protobuf's wire type."""
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
    raise _OtherForm  # groups are of an older protobuf


def _frame(message: bytes, at: int) -> tuple[WireFrame, int]:
    """One of them, and what comes after it."""
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


class _OtherForm(Exception):  # noqa: N818 - nothing is wrong
    """It is protobuf's to read."""


def _tag(message: bytes, at: int, tag: int) -> int:
    """What comes after a field's tag."""
    if message[at] != tag:
        raise _OtherForm
    return at + 1


def _length(message: bytes, at: int) -> tuple[int, int]:
    """A varint of at most 28 bits, and what comes after it."""
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


READERS = {"Push": push_request, "Join": join_request}  # of requests


class _Pushing:
    """A call to Push: what is written is cut into pieces."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - gRPC's
        self._call = call

    async def write(self, message: Sent) -> None:
        """As gRPC's."""
        for piece in split(serialise(message)):
            await self._call.write(piece)

    def __aiter__(self) -> AsyncIterator[pb.PushReply]:
        replies: AsyncIterator[pb.PushReply] = self._call.__aiter__()
        return replies

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest is gRPC's
        return getattr(self._call, name)


class _Fetching:
    """A call to Fetch: what comes in pieces is put together."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - gRPC's
        self._call = call
        self._pieces = Pieces(REPLY_BYTES)

    async def read(self) -> Any:  # noqa: ANN401 - a reply, or gRPC's EOF
        """As gRPC's."""
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
    """As it was generated, but for the calls whose messages may be large."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)  # type: ignore[no-untyped-call]
        push: Any = channel.stream_stream(f"/{SERVICE}/Push", response_deserializer=pb.PushReply.FromString)
        fetch: Any = channel.unary_stream(f"/{SERVICE}/Fetch", request_serializer=pb.FetchRequest.SerializeToString)
        join: Any = channel.stream_unary(f"/{SERVICE}/Join", response_deserializer=pb.JoinReply.FromString)
        self.Push: Any = lambda **how: _Pushing(push(**how))
        self.Fetch: Any = lambda request, **how: _Fetching(fetch(request, **how))
        self.Join: Any = lambda request, **how: join(split(request.SerializeToString()), **how)


def serve(servicer: rpc.OuterServicer, server: grpc.aio.Server) -> None:
    """Adds the service, with messages of frames read and written by this module.

    Not by the generated function: of two handlers of a method it depends on gRPC's version which one counts.
    """
    handlers = {}
    for method in pb.DESCRIPTOR.services_by_name["Outer"].methods:
        kind = "_".join("stream" if many else "unary" for many in (method.client_streaming, method.server_streaming))
        read = READERS.get(method.name) or GetMessageClass(method.input_type).FromString
        made = getattr(grpc, f"{kind}_rpc_method_handler")(getattr(servicer, method.name), read, serialise)
        handlers[method.name] = made
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
