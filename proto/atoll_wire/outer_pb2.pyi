from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_FLOAT32: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_UNSPECIFIED: _ClassVar[Compression]
    COMPRESSION_AUTO: _ClassVar[Compression]
    COMPRESSION_ALWAYS: _ClassVar[Compression]
    COMPRESSION_NEVER: _ClassVar[Compression]

class MergeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MERGE_KIND_UNSPECIFIED: _ClassVar[MergeKind]
    MERGE_KIND_AVERAGE: _ClassVar[MergeKind]
    MERGE_KIND_DIRECTION: _ClassVar[MergeKind]

class Fate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FATE_UNSPECIFIED: _ClassVar[Fate]
    FATE_PENDING: _ClassVar[Fate]
    FATE_MERGED: _ClassVar[Fate]
    FATE_REFUSED: _ClassVar[Fate]

class RoundOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUND_OUTCOME_UNSPECIFIED: _ClassVar[RoundOutcome]
    ROUND_OUTCOME_OPEN: _ClassVar[RoundOutcome]
    ROUND_OUTCOME_MERGING: _ClassVar[RoundOutcome]
    ROUND_OUTCOME_MERGED: _ClassVar[RoundOutcome]
    ROUND_OUTCOME_LAPSED: _ClassVar[RoundOutcome]
CODEC_UNSPECIFIED: Codec
CODEC_FLOAT32: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec
COMPRESSION_UNSPECIFIED: Compression
COMPRESSION_AUTO: Compression
COMPRESSION_ALWAYS: Compression
COMPRESSION_NEVER: Compression
MERGE_KIND_UNSPECIFIED: MergeKind
MERGE_KIND_AVERAGE: MergeKind
MERGE_KIND_DIRECTION: MergeKind
FATE_UNSPECIFIED: Fate
FATE_PENDING: Fate
FATE_MERGED: Fate
FATE_REFUSED: Fate
ROUND_OUTCOME_UNSPECIFIED: RoundOutcome
ROUND_OUTCOME_OPEN: RoundOutcome
ROUND_OUTCOME_MERGING: RoundOutcome
ROUND_OUTCOME_MERGED: RoundOutcome
ROUND_OUTCOME_LAPSED: RoundOutcome

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype", "kind", "tied_names")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIED_NAMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    kind: MergeKind
    tied_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., kind: _Optional[_Union[MergeKind, str]] = ..., tied_names: _Optional[_Iterable[str]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "run", "learner", "region", "nonce", "tensors", "frozen_digest", "process_age_s", "incarnation", "proof", "fleet", "part", "more")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_AGE_S_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run: str
    learner: str
    region: str
    nonce: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    frozen_digest: bytes
    process_age_s: float
    incarnation: int
    proof: bytes
    fleet: str
    part: bytes
    more: bool
    def __init__(self, protocol: _Optional[int] = ..., run: _Optional[str] = ..., learner: _Optional[str] = ..., region: _Optional[str] = ..., nonce: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., frozen_digest: _Optional[bytes] = ..., process_age_s: _Optional[float] = ..., incarnation: _Optional[int] = ..., proof: _Optional[bytes] = ..., fleet: _Optional[str] = ..., part: _Optional[bytes] = ..., more: bool = ...) -> None: ...

class RunSettings(_message.Message):
    __slots__ = ("inner_steps", "fragments", "overlap_steps", "codec", "max_staleness", "total_tokens", "compression")
    INNER_STEPS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_STEPS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    inner_steps: int
    fragments: int
    overlap_steps: float
    codec: Codec
    max_staleness: int
    total_tokens: int
    compression: Compression
    def __init__(self, inner_steps: _Optional[int] = ..., fragments: _Optional[int] = ..., overlap_steps: _Optional[float] = ..., codec: _Optional[_Union[Codec, str]] = ..., max_staleness: _Optional[int] = ..., total_tokens: _Optional[int] = ..., compression: _Optional[_Union[Compression, str]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("state", "run", "generation", "epoch", "incarnation", "token", "settings", "fingerprint", "versions", "run_tokens", "retry_s", "log", "voided_tokens", "shards", "earlier_tokens", "earlier_steps")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[JoinReply.State]
        STATE_READY: _ClassVar[JoinReply.State]
        STATE_INITIALISE: _ClassVar[JoinReply.State]
        STATE_WAIT: _ClassVar[JoinReply.State]
        STATE_CONFIRM: _ClassVar[JoinReply.State]
    STATE_UNSPECIFIED: JoinReply.State
    STATE_READY: JoinReply.State
    STATE_INITIALISE: JoinReply.State
    STATE_WAIT: JoinReply.State
    STATE_CONFIRM: JoinReply.State
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETRY_S_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    VOIDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_STEPS_FIELD_NUMBER: _ClassVar[int]
    state: JoinReply.State
    run: str
    generation: int
    epoch: int
    incarnation: int
    token: bytes
    settings: RunSettings
    fingerprint: bytes
    versions: _containers.ScalarMap[int, int]
    run_tokens: int
    retry_s: float
    log: int
    voided_tokens: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardPlace]
    earlier_tokens: int
    earlier_steps: int
    def __init__(self, state: _Optional[_Union[JoinReply.State, str]] = ..., run: _Optional[str] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[int] = ..., token: _Optional[bytes] = ..., settings: _Optional[_Union[RunSettings, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., versions: _Optional[_Mapping[int, int]] = ..., run_tokens: _Optional[int] = ..., retry_s: _Optional[float] = ..., log: _Optional[int] = ..., voided_tokens: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardPlace, _Mapping]]] = ..., earlier_tokens: _Optional[int] = ..., earlier_steps: _Optional[int] = ...) -> None: ...

class ShardPlace(_message.Message):
    __slots__ = ("address", "fragments")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    fragments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, address: _Optional[str] = ..., fragments: _Optional[_Iterable[int]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("run", "learner", "incarnation", "generation", "token")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    run: str
    learner: str
    incarnation: int
    generation: int
    token: bytes
    def __init__(self, run: _Optional[str] = ..., learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., generation: _Optional[int] = ..., token: _Optional[bytes] = ...) -> None: ...

class InitialiseRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: InitialiseHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[InitialiseHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class InitialiseHeader(_message.Message):
    __slots__ = ("session", "size_bytes", "sha256")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    session: Session
    size_bytes: int
    sha256: bytes
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class InitialiseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("session", "log", "sequence", "shard", "front")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    session: Session
    log: int
    sequence: int
    shard: int
    front: int
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., log: _Optional[int] = ..., sequence: _Optional[int] = ..., shard: _Optional[int] = ..., front: _Optional[int] = ...) -> None: ...

class Notification(_message.Message):
    __slots__ = ("log", "sequence", "current", "opened", "published", "shutting_down", "receipt", "paused")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    SHUTTING_DOWN_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    log: int
    sequence: int
    current: FullState
    opened: RoundOpened
    published: UpdatePublished
    shutting_down: ShuttingDown
    receipt: Receipt
    paused: Paused
    def __init__(self, log: _Optional[int] = ..., sequence: _Optional[int] = ..., current: _Optional[_Union[FullState, _Mapping]] = ..., opened: _Optional[_Union[RoundOpened, _Mapping]] = ..., published: _Optional[_Union[UpdatePublished, _Mapping]] = ..., shutting_down: _Optional[_Union[ShuttingDown, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ...) -> None: ...

class FullState(_message.Message):
    __slots__ = ("versions", "open", "run_tokens", "paused", "voided_tokens")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    VOIDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.ScalarMap[int, int]
    open: _containers.RepeatedCompositeFieldContainer[RoundOpened]
    run_tokens: int
    paused: Paused
    voided_tokens: int
    def __init__(self, versions: _Optional[_Mapping[int, int]] = ..., open: _Optional[_Iterable[_Union[RoundOpened, _Mapping]]] = ..., run_tokens: _Optional[int] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ..., voided_tokens: _Optional[int] = ...) -> None: ...

class RoundOpened(_message.Message):
    __slots__ = ("fragment", "cycle")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    cycle: int
    def __init__(self, fragment: _Optional[int] = ..., cycle: _Optional[int] = ...) -> None: ...

class UpdatePublished(_message.Message):
    __slots__ = ("fragment", "version", "size_bytes", "run_tokens", "voided_tokens")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOIDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    size_bytes: int
    run_tokens: int
    voided_tokens: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., run_tokens: _Optional[int] = ..., voided_tokens: _Optional[int] = ...) -> None: ...

class ShuttingDown(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Paused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("learner", "incarnation", "fragment", "seq", "fate", "version", "weight", "staleness", "reason", "drop_outstanding")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DROP_OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    learner: str
    incarnation: int
    fragment: int
    seq: int
    fate: Fate
    version: int
    weight: float
    staleness: float
    reason: str
    drop_outstanding: bool
    def __init__(self, learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., fragment: _Optional[int] = ..., seq: _Optional[int] = ..., fate: _Optional[_Union[Fate, str]] = ..., version: _Optional[int] = ..., weight: _Optional[float] = ..., staleness: _Optional[float] = ..., reason: _Optional[str] = ..., drop_outstanding: bool = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("index", "crc32c", "payload")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    index: int
    crc32c: int
    payload: bytes
    def __init__(self, index: _Optional[int] = ..., crc32c: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "frames", "part", "more")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    part: bytes
    more: bool
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., part: _Optional[bytes] = ..., more: bool = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("session", "fragment", "seq", "cycle", "base_version", "tokens", "steps", "codec", "frames", "size_bytes", "digest", "control_only", "units")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ONLY_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    session: Session
    fragment: int
    seq: int
    cycle: int
    base_version: int
    tokens: int
    steps: int
    codec: Codec
    frames: int
    size_bytes: int
    digest: bytes
    control_only: bool
    units: _containers.RepeatedCompositeFieldContainer[UnitRange]
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., fragment: _Optional[int] = ..., seq: _Optional[int] = ..., cycle: _Optional[int] = ..., base_version: _Optional[int] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., codec: _Optional[_Union[Codec, str]] = ..., frames: _Optional[int] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., control_only: bool = ..., units: _Optional[_Iterable[_Union[UnitRange, _Mapping]]] = ...) -> None: ...

class UnitRange(_message.Message):
    __slots__ = ("lease", "after", "upto")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    lease: int
    after: int
    upto: int
    def __init__(self, lease: _Optional[int] = ..., after: _Optional[int] = ..., upto: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("received", "receipt")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    received: ReceivedFrames
    receipt: Receipt
    def __init__(self, received: _Optional[_Union[ReceivedFrames, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class ReceivedFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, frames: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("session", "fragment", "version", "whole", "frames", "header_only", "fast")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    HEADER_ONLY_FIELD_NUMBER: _ClassVar[int]
    FAST_FIELD_NUMBER: _ClassVar[int]
    session: Session
    fragment: int
    version: int
    whole: bool
    frames: _containers.RepeatedScalarFieldContainer[int]
    header_only: bool
    fast: bool
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., whole: bool = ..., frames: _Optional[_Iterable[int]] = ..., header_only: bool = ..., fast: bool = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("header", "frames", "part", "more")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    header: FetchHeader
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    part: bytes
    more: bool
    def __init__(self, header: _Optional[_Union[FetchHeader, _Mapping]] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., part: _Optional[bytes] = ..., more: bool = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("fragment", "version", "codec", "frames", "size_bytes", "crc32c", "receipts")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    codec: Codec
    frames: int
    size_bytes: int
    crc32c: int
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., codec: _Optional[_Union[Codec, str]] = ..., frames: _Optional[int] = ..., size_bytes: _Optional[int] = ..., crc32c: _Optional[int] = ..., receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("run", "generation", "settings", "fingerprint", "shards", "fixed_bytes", "fixed_frames")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    FIXED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIXED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    run: str
    generation: int
    settings: RunSettings
    fingerprint: bytes
    shards: _containers.RepeatedCompositeFieldContainer[ShardPlace]
    fixed_bytes: int
    fixed_frames: int
    def __init__(self, run: _Optional[str] = ..., generation: _Optional[int] = ..., settings: _Optional[_Union[RunSettings, _Mapping]] = ..., fingerprint: _Optional[bytes] = ..., shards: _Optional[_Iterable[_Union[ShardPlace, _Mapping]]] = ..., fixed_bytes: _Optional[int] = ..., fixed_frames: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run", "generation")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    generation: int
    def __init__(self, run: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("shard", "log", "versions")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    log: int
    versions: _containers.RepeatedCompositeFieldContainer[PublishedVersion]
    def __init__(self, shard: _Optional[int] = ..., log: _Optional[int] = ..., versions: _Optional[_Iterable[_Union[PublishedVersion, _Mapping]]] = ...) -> None: ...

class PublishedVersion(_message.Message):
    __slots__ = ("fragment", "version", "crc32c", "frames")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    crc32c: int
    frames: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., crc32c: _Optional[int] = ..., frames: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("run", "generation", "fragment", "version", "whole", "fixed", "frames", "fast")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FAST_FIELD_NUMBER: _ClassVar[int]
    run: str
    generation: int
    fragment: int
    version: int
    whole: bool
    fixed: bool
    frames: _containers.RepeatedScalarFieldContainer[int]
    fast: bool
    def __init__(self, run: _Optional[str] = ..., generation: _Optional[int] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., whole: bool = ..., fixed: bool = ..., frames: _Optional[_Iterable[int]] = ..., fast: bool = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("session", "steps", "tokens", "loss", "step_time_s", "stepping_s", "blocked_s", "joining_s", "paused_s", "abandoned_tokens", "paused", "declined", "adopted", "bytes_up", "bytes_down", "bytes_whole", "prepared_s", "first_step_s", "shard", "round_trip_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    STEPPING_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_S_FIELD_NUMBER: _ClassVar[int]
    JOINING_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    BYTES_WHOLE_FIELD_NUMBER: _ClassVar[int]
    PREPARED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    session: Session
    steps: int
    tokens: int
    loss: float
    step_time_s: float
    stepping_s: float
    blocked_s: float
    joining_s: float
    paused_s: float
    abandoned_tokens: int
    paused: bool
    declined: _containers.RepeatedCompositeFieldContainer[Declined]
    adopted: _containers.RepeatedCompositeFieldContainer[Adopted]
    bytes_up: int
    bytes_down: int
    bytes_whole: int
    prepared_s: float
    first_step_s: float
    shard: int
    round_trip_s: float
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., step_time_s: _Optional[float] = ..., stepping_s: _Optional[float] = ..., blocked_s: _Optional[float] = ..., joining_s: _Optional[float] = ..., paused_s: _Optional[float] = ..., abandoned_tokens: _Optional[int] = ..., paused: bool = ..., declined: _Optional[_Iterable[_Union[Declined, _Mapping]]] = ..., adopted: _Optional[_Iterable[_Union[Adopted, _Mapping]]] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., bytes_whole: _Optional[int] = ..., prepared_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., shard: _Optional[int] = ..., round_trip_s: _Optional[float] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("fragment", "cycle", "reason")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    cycle: int
    reason: str
    def __init__(self, fragment: _Optional[int] = ..., cycle: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("fragment", "version")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FrontReport(_message.Message):
    __slots__ = ("nonce", "region", "round_trip_s", "bytes_up", "bytes_down", "leaving")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    region: str
    round_trip_s: float
    bytes_up: int
    bytes_down: int
    leaving: bool
    def __init__(self, nonce: _Optional[int] = ..., region: _Optional[str] = ..., round_trip_s: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., leaving: bool = ...) -> None: ...

class FrontReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DatasetDeclaration(_message.Message):
    __slots__ = ("name", "units", "tokens", "seed", "epochs", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    units: int
    tokens: int
    seed: int
    epochs: int
    fingerprint: bytes
    def __init__(self, name: _Optional[str] = ..., units: _Optional[int] = ..., tokens: _Optional[int] = ..., seed: _Optional[int] = ..., epochs: _Optional[int] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class LeaseUnitsRequest(_message.Message):
    __slots__ = ("session", "dataset", "lease", "received", "finished", "wanted")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    session: Session
    dataset: DatasetDeclaration
    lease: int
    received: int
    finished: int
    wanted: int
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., dataset: _Optional[_Union[DatasetDeclaration, _Mapping]] = ..., lease: _Optional[int] = ..., received: _Optional[int] = ..., finished: _Optional[int] = ..., wanted: _Optional[int] = ...) -> None: ...

class LeaseUnitsReply(_message.Message):
    __slots__ = ("state", "lease", "units", "epochs", "retry_s", "held_by")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[LeaseUnitsReply.State]
        STATE_LEASED: _ClassVar[LeaseUnitsReply.State]
        STATE_WAIT: _ClassVar[LeaseUnitsReply.State]
        STATE_FINISHED: _ClassVar[LeaseUnitsReply.State]
    STATE_UNSPECIFIED: LeaseUnitsReply.State
    STATE_LEASED: LeaseUnitsReply.State
    STATE_WAIT: LeaseUnitsReply.State
    STATE_FINISHED: LeaseUnitsReply.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    RETRY_S_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    state: LeaseUnitsReply.State
    lease: int
    units: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    retry_s: float
    held_by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, state: _Optional[_Union[LeaseUnitsReply.State, str]] = ..., lease: _Optional[int] = ..., units: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., retry_s: _Optional[float] = ..., held_by: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("session", "last")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    session: Session
    last: Progress
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., last: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run", "generation", "epoch", "uptime_s", "wall_s", "settings", "parameters", "fragments", "learners", "goodput", "contributions", "merges", "tokens_trained", "tokens_merged", "wire", "troubles", "at", "paused", "accepts_tokens", "wan_budget_bytes", "restored", "shards", "datasets", "links")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    MERGES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MERGED_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAN_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    DATASETS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    run: str
    generation: int
    epoch: int
    uptime_s: float
    wall_s: float
    settings: RunSettings
    parameters: int
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentStatus]
    learners: _containers.RepeatedCompositeFieldContainer[LearnerStatus]
    goodput: Goodput
    contributions: Contributions
    merges: int
    tokens_trained: int
    tokens_merged: float
    wire: WireBytes
    troubles: _containers.RepeatedScalarFieldContainer[str]
    at: float
    paused: str
    accepts_tokens: bool
    wan_budget_bytes: int
    restored: Restored
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    datasets: _containers.RepeatedCompositeFieldContainer[DatasetStatus]
    links: _containers.RepeatedCompositeFieldContainer[LinkStatus]
    def __init__(self, run: _Optional[str] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., wall_s: _Optional[float] = ..., settings: _Optional[_Union[RunSettings, _Mapping]] = ..., parameters: _Optional[int] = ..., fragments: _Optional[_Iterable[_Union[FragmentStatus, _Mapping]]] = ..., learners: _Optional[_Iterable[_Union[LearnerStatus, _Mapping]]] = ..., goodput: _Optional[_Union[Goodput, _Mapping]] = ..., contributions: _Optional[_Union[Contributions, _Mapping]] = ..., merges: _Optional[int] = ..., tokens_trained: _Optional[int] = ..., tokens_merged: _Optional[float] = ..., wire: _Optional[_Union[WireBytes, _Mapping]] = ..., troubles: _Optional[_Iterable[str]] = ..., at: _Optional[float] = ..., paused: _Optional[str] = ..., accepts_tokens: bool = ..., wan_budget_bytes: _Optional[int] = ..., restored: _Optional[_Union[Restored, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., datasets: _Optional[_Iterable[_Union[DatasetStatus, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkStatus, _Mapping]]] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("name", "region", "front", "state", "heard_s", "round_trip_s", "byte_s", "up_bytes_per_s", "down_bytes_per_s", "learners", "budget_s", "bytes_up", "bytes_down", "trouble")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    FRONT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARD_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    BYTE_S_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    region: str
    front: bool
    state: str
    heard_s: float
    round_trip_s: float
    byte_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    learners: _containers.RepeatedScalarFieldContainer[str]
    budget_s: float
    bytes_up: int
    bytes_down: int
    trouble: str
    def __init__(self, name: _Optional[str] = ..., region: _Optional[str] = ..., front: bool = ..., state: _Optional[str] = ..., heard_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., byte_s: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., learners: _Optional[_Iterable[str]] = ..., budget_s: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class DatasetStatus(_message.Message):
    __slots__ = ("name", "units", "epochs", "tokens", "epoch", "consumed", "leased", "returned", "repeated", "lost")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    units: int
    epochs: int
    tokens: int
    epoch: int
    consumed: int
    leased: int
    returned: int
    repeated: float
    lost: float
    def __init__(self, name: _Optional[str] = ..., units: _Optional[int] = ..., epochs: _Optional[int] = ..., tokens: _Optional[int] = ..., epoch: _Optional[int] = ..., consumed: _Optional[int] = ..., leased: _Optional[int] = ..., returned: _Optional[int] = ..., repeated: _Optional[float] = ..., lost: _Optional[float] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("shard", "address", "attached", "fragments", "heard_s")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    HEARD_S_FIELD_NUMBER: _ClassVar[int]
    shard: int
    address: str
    attached: bool
    fragments: _containers.RepeatedScalarFieldContainer[int]
    heard_s: float
    def __init__(self, shard: _Optional[int] = ..., address: _Optional[str] = ..., attached: bool = ..., fragments: _Optional[_Iterable[int]] = ..., heard_s: _Optional[float] = ...) -> None: ...

class Restored(_message.Message):
    __slots__ = ("checkpoint", "at", "backup_at", "undone_tokens")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    BACKUP_AT_FIELD_NUMBER: _ClassVar[int]
    UNDONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    checkpoint: int
    at: float
    backup_at: float
    undone_tokens: int
    def __init__(self, checkpoint: _Optional[int] = ..., at: _Optional[float] = ..., backup_at: _Optional[float] = ..., undone_tokens: _Optional[int] = ...) -> None: ...

class FragmentStatus(_message.Message):
    __slots__ = ("fragment", "parameters", "version", "cycle", "state", "published_s", "outer_steps")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_S_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEPS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    parameters: int
    version: int
    cycle: int
    state: str
    published_s: float
    outer_steps: float
    def __init__(self, fragment: _Optional[int] = ..., parameters: _Optional[int] = ..., version: _Optional[int] = ..., cycle: _Optional[int] = ..., state: _Optional[str] = ..., published_s: _Optional[float] = ..., outer_steps: _Optional[float] = ...) -> None: ...

class LearnerStatus(_message.Message):
    __slots__ = ("learner", "region", "incarnation", "state", "steps", "tokens", "loss", "step_time_s", "last_seen_age_s", "blocked_fraction", "waiting_for", "goodput", "pending", "wire", "recovery", "since", "uploading")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UPLOADING_FIELD_NUMBER: _ClassVar[int]
    learner: str
    region: str
    incarnation: int
    state: str
    steps: int
    tokens: int
    loss: float
    step_time_s: float
    last_seen_age_s: float
    blocked_fraction: float
    waiting_for: str
    goodput: Goodput
    pending: int
    wire: WireBytes
    recovery: Recovery
    since: float
    uploading: bool
    def __init__(self, learner: _Optional[str] = ..., region: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[str] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., step_time_s: _Optional[float] = ..., last_seen_age_s: _Optional[float] = ..., blocked_fraction: _Optional[float] = ..., waiting_for: _Optional[str] = ..., goodput: _Optional[_Union[Goodput, _Mapping]] = ..., pending: _Optional[int] = ..., wire: _Optional[_Union[WireBytes, _Mapping]] = ..., recovery: _Optional[_Union[Recovery, _Mapping]] = ..., since: _Optional[float] = ..., uploading: bool = ...) -> None: ...

class Recovery(_message.Message):
    __slots__ = ("down_s", "prepared_s", "joining_s", "first_step_s")
    DOWN_S_FIELD_NUMBER: _ClassVar[int]
    PREPARED_S_FIELD_NUMBER: _ClassVar[int]
    JOINING_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    down_s: float
    prepared_s: float
    joining_s: float
    first_step_s: float
    def __init__(self, down_s: _Optional[float] = ..., prepared_s: _Optional[float] = ..., joining_s: _Optional[float] = ..., first_step_s: _Optional[float] = ...) -> None: ...

class Goodput(_message.Message):
    __slots__ = ("ratio", "useful_s", "provisioned_s", "lost_s")
    class LostSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RATIO_FIELD_NUMBER: _ClassVar[int]
    USEFUL_S_FIELD_NUMBER: _ClassVar[int]
    PROVISIONED_S_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    ratio: float
    useful_s: float
    provisioned_s: float
    lost_s: _containers.ScalarMap[str, float]
    def __init__(self, ratio: _Optional[float] = ..., useful_s: _Optional[float] = ..., provisioned_s: _Optional[float] = ..., lost_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Contributions(_message.Message):
    __slots__ = ("accepted", "merged", "refused", "pending", "turned_away")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    TURNED_AWAY_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    merged: int
    refused: int
    pending: int
    turned_away: int
    def __init__(self, accepted: _Optional[int] = ..., merged: _Optional[int] = ..., refused: _Optional[int] = ..., pending: _Optional[int] = ..., turned_away: _Optional[int] = ...) -> None: ...

class WireBytes(_message.Message):
    __slots__ = ("up", "down", "up_parameters", "down_parameters", "whole")
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    UP_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DOWN_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    up: int
    down: int
    up_parameters: int
    down_parameters: int
    whole: int
    def __init__(self, up: _Optional[int] = ..., down: _Optional[int] = ..., up_parameters: _Optional[int] = ..., down_parameters: _Optional[int] = ..., whole: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("padding", "wanted_bytes")
    PADDING_FIELD_NUMBER: _ClassVar[int]
    WANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    wanted_bytes: int
    def __init__(self, padding: _Optional[bytes] = ..., wanted_bytes: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("wall_s", "run", "fingerprint", "frozen_digest", "message_bytes", "via", "padding", "fragments", "shards")
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FROZEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    wall_s: float
    run: str
    fingerprint: bytes
    frozen_digest: bytes
    message_bytes: int
    via: _containers.RepeatedScalarFieldContainer[str]
    padding: bytes
    fragments: int
    shards: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, wall_s: _Optional[float] = ..., run: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., frozen_digest: _Optional[bytes] = ..., message_bytes: _Optional[int] = ..., via: _Optional[_Iterable[str]] = ..., padding: _Optional[bytes] = ..., fragments: _Optional[int] = ..., shards: _Optional[_Iterable[str]] = ...) -> None: ...

class ListReceiptsRequest(_message.Message):
    __slots__ = ("learner", "fate", "limit", "before")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    learner: str
    fate: Fate
    limit: int
    before: str
    def __init__(self, learner: _Optional[str] = ..., fate: _Optional[_Union[Fate, str]] = ..., limit: _Optional[int] = ..., before: _Optional[str] = ...) -> None: ...

class ListReceiptsReply(_message.Message):
    __slots__ = ("receipts", "next", "missing")
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[LoggedReceipt]
    next: str
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, receipts: _Optional[_Iterable[_Union[LoggedReceipt, _Mapping]]] = ..., next: _Optional[str] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class LoggedReceipt(_message.Message):
    __slots__ = ("number", "receipt", "tokens", "steps", "base_version", "size_bytes", "norm", "clipped", "accepted_at", "shard")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    number: int
    receipt: Receipt
    tokens: int
    steps: int
    base_version: int
    size_bytes: int
    norm: float
    clipped: float
    accepted_at: float
    shard: int
    def __init__(self, number: _Optional[int] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., base_version: _Optional[int] = ..., size_bytes: _Optional[int] = ..., norm: _Optional[float] = ..., clipped: _Optional[float] = ..., accepted_at: _Optional[float] = ..., shard: _Optional[int] = ...) -> None: ...

class ListRoundsRequest(_message.Message):
    __slots__ = ("last", "learner", "brief")
    LAST_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    last: int
    learner: str
    brief: bool
    def __init__(self, last: _Optional[int] = ..., learner: _Optional[str] = ..., brief: bool = ...) -> None: ...

class ListRoundsReply(_message.Message):
    __slots__ = ("rounds", "missing")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("fragment", "cycle", "version", "outcome", "reason", "opened_at", "quorum_at", "closed_at", "merged_at", "published_at", "answers", "more_answers")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OPENED_AT_FIELD_NUMBER: _ClassVar[int]
    QUORUM_AT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_FIELD_NUMBER: _ClassVar[int]
    MERGED_AT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    MORE_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    cycle: int
    version: int
    outcome: RoundOutcome
    reason: str
    opened_at: float
    quorum_at: float
    closed_at: float
    merged_at: float
    published_at: float
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    more_answers: int
    def __init__(self, fragment: _Optional[int] = ..., cycle: _Optional[int] = ..., version: _Optional[int] = ..., outcome: _Optional[_Union[RoundOutcome, str]] = ..., reason: _Optional[str] = ..., opened_at: _Optional[float] = ..., quorum_at: _Optional[float] = ..., closed_at: _Optional[float] = ..., merged_at: _Optional[float] = ..., published_at: _Optional[float] = ..., answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., more_answers: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("learner", "began_at", "durable_at", "adopted_at", "declined", "late", "weight", "staleness")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_AT_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_AT_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    learner: str
    began_at: float
    durable_at: float
    adopted_at: float
    declined: str
    late: bool
    weight: float
    staleness: float
    def __init__(self, learner: _Optional[str] = ..., began_at: _Optional[float] = ..., durable_at: _Optional[float] = ..., adopted_at: _Optional[float] = ..., declined: _Optional[str] = ..., late: bool = ..., weight: _Optional[float] = ..., staleness: _Optional[float] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("log", "after")
    LOG_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    log: int
    after: int
    def __init__(self, log: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class ListEventsReply(_message.Message):
    __slots__ = ("log", "events")
    LOG_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    log: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, log: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "at", "kind", "learner", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    at: float
    kind: str
    learner: str
    text: str
    def __init__(self, number: _Optional[int] = ..., at: _Optional[float] = ..., kind: _Optional[str] = ..., learner: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("learner", "reason", "tokens", "gone")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    learner: str
    reason: str
    tokens: int
    gone: bool
    def __init__(self, learner: _Optional[str] = ..., reason: _Optional[str] = ..., tokens: _Optional[int] = ..., gone: bool = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("unconfirmed",)
    UNCONFIRMED_FIELD_NUMBER: _ClassVar[int]
    unconfirmed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unconfirmed: _Optional[_Iterable[int]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ("unconfirmed",)
    UNCONFIRMED_FIELD_NUMBER: _ClassVar[int]
    unconfirmed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unconfirmed: _Optional[_Iterable[int]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCheckpointsReply(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("id", "taken_at", "versions", "size_bytes", "generation")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    TAKEN_AT_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    id: int
    taken_at: float
    versions: _containers.ScalarMap[int, int]
    size_bytes: int
    generation: int
    def __init__(self, id: _Optional[int] = ..., taken_at: _Optional[float] = ..., versions: _Optional[_Mapping[int, int]] = ..., size_bytes: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class TakeCheckpointRequest(_message.Message):
    __slots__ = ("named",)
    NAMED_FIELD_NUMBER: _ClassVar[int]
    named: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, named: _Optional[_Iterable[int]] = ...) -> None: ...

class ExportCheckpointRequest(_message.Message):
    __slots__ = ("initial", "fragment")
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    initial: bool
    fragment: int
    def __init__(self, initial: bool = ..., fragment: _Optional[int] = ...) -> None: ...

class ExportCheckpointReply(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...
