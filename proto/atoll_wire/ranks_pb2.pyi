from atoll_wire import outer_pb2 as _outer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankMessage(_message.Message):
    __slots__ = ("sender", "joined", "announced", "table", "ended", "refetch", "opened", "confirmed", "part", "rows", "session_lost", "traffic")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REFETCH_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SESSION_LOST_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    sender: int
    joined: Joined
    announced: Announced
    table: Table
    ended: Ended
    refetch: Refetch
    opened: Opened
    confirmed: Confirmed
    part: Part
    rows: Table
    session_lost: SessionLost
    traffic: Traffic
    def __init__(self, sender: _Optional[int] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., announced: _Optional[_Union[Announced, _Mapping]] = ..., table: _Optional[_Union[Table, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., refetch: _Optional[_Union[Refetch, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., confirmed: _Optional[_Union[Confirmed, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., rows: _Optional[_Union[Table, _Mapping]] = ..., session_lost: _Optional[_Union[SessionLost, _Mapping]] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("reply", "restores", "address")
    REPLY_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    reply: _outer_pb2.JoinReply
    restores: int
    address: str
    def __init__(self, reply: _Optional[_Union[_outer_pb2.JoinReply, _Mapping]] = ..., restores: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Announced(_message.Message):
    __slots__ = ("fragment", "version", "setbacks", "skipped_to")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SETBACKS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TO_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    setbacks: int
    skipped_to: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., setbacks: _Optional[int] = ..., skipped_to: _Optional[int] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("fragment", "seq", "sizes", "checksums")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    seq: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fragment: _Optional[int] = ..., seq: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("fragment", "seq", "drop")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    seq: int
    drop: bool
    def __init__(self, fragment: _Optional[int] = ..., seq: _Optional[int] = ..., drop: bool = ...) -> None: ...

class Refetch(_message.Message):
    __slots__ = ("fragment",)
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    def __init__(self, fragment: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("fragment",)
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    def __init__(self, fragment: _Optional[int] = ...) -> None: ...

class AnchorName(_message.Message):
    __slots__ = ("version", "checksum")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    version: int
    checksum: int
    def __init__(self, version: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Confirmed(_message.Message):
    __slots__ = ("fragment", "newest", "chosen")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    newest: AnchorName
    chosen: AnchorName
    def __init__(self, fragment: _Optional[int] = ..., newest: _Optional[_Union[AnchorName, _Mapping]] = ..., chosen: _Optional[_Union[AnchorName, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("fragment", "version", "published", "crc32c", "merged", "generation")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    published: int
    crc32c: int
    merged: int
    generation: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., published: _Optional[int] = ..., crc32c: _Optional[int] = ..., merged: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class SessionLost(_message.Message):
    __slots__ = ("shard", "token")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    shard: int
    token: bytes
    def __init__(self, shard: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("up", "down", "whole")
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    up: int
    down: int
    whole: int
    def __init__(self, up: _Optional[int] = ..., down: _Optional[int] = ..., whole: _Optional[int] = ...) -> None: ...
