from atoll_wire import outer_pb2 as _outer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromShard(_message.Message):
    __slots__ = ("hello", "staged", "confirmed", "summary", "event")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    staged: Staged
    confirmed: Confirmed
    summary: Summary
    event: _outer_pb2.Event
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., staged: _Optional[_Union[Staged, _Mapping]] = ..., confirmed: _Optional[_Union[Confirmed, _Mapping]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ..., event: _Optional[_Union[_outer_pb2.Event, _Mapping]] = ...) -> None: ...

class FromRegistrar(_message.Message):
    __slots__ = ("sequence", "welcome", "stage", "begun", "member", "view", "keep", "lease")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    welcome: Welcome
    stage: Stage
    begun: Begun
    member: Member
    view: View
    keep: Keep
    lease: AwaitedLease
    def __init__(self, sequence: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., stage: _Optional[_Union[Stage, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., lease: _Optional[_Union[AwaitedLease, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "shard", "shards", "address", "run", "generation", "staged", "epoch", "directory")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    shard: int
    shards: int
    address: str
    run: str
    generation: int
    staged: bytes
    epoch: int
    directory: bytes
    def __init__(self, protocol: _Optional[int] = ..., shard: _Optional[int] = ..., shards: _Optional[int] = ..., address: _Optional[str] = ..., run: _Optional[str] = ..., generation: _Optional[int] = ..., staged: _Optional[bytes] = ..., epoch: _Optional[int] = ..., directory: _Optional[bytes] = ...) -> None: ...

class Staged(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    def __init__(self, sha256: _Optional[bytes] = ...) -> None: ...

class Confirmed(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("fragments", "contributions", "learners", "troubles", "leases")
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    fragments: _containers.RepeatedCompositeFieldContainer[_outer_pb2.FragmentStatus]
    contributions: _outer_pb2.Contributions
    learners: _containers.RepeatedCompositeFieldContainer[LearnerSums]
    troubles: _containers.RepeatedScalarFieldContainer[str]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseSums]
    def __init__(self, fragments: _Optional[_Iterable[_Union[_outer_pb2.FragmentStatus, _Mapping]]] = ..., contributions: _Optional[_Union[_outer_pb2.Contributions, _Mapping]] = ..., learners: _Optional[_Iterable[_Union[LearnerSums, _Mapping]]] = ..., troubles: _Optional[_Iterable[str]] = ..., leases: _Optional[_Iterable[_Union[LeaseSums, _Mapping]]] = ...) -> None: ...

class LeaseSums(_message.Message):
    __slots__ = ("lease", "settled", "fragments")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    settled: bool
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentUnits]
    def __init__(self, lease: _Optional[int] = ..., settled: bool = ..., fragments: _Optional[_Iterable[_Union[FragmentUnits, _Mapping]]] = ...) -> None: ...

class FragmentUnits(_message.Message):
    __slots__ = ("fragment", "through", "firsts", "lasts")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    FIRSTS_FIELD_NUMBER: _ClassVar[int]
    LASTS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    through: int
    firsts: _containers.RepeatedScalarFieldContainer[int]
    lasts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fragment: _Optional[int] = ..., through: _Optional[int] = ..., firsts: _Optional[_Iterable[int]] = ..., lasts: _Optional[_Iterable[int]] = ...) -> None: ...

class LearnerSums(_message.Message):
    __slots__ = ("learner", "merged_token_parameters", "bytes_up", "parameters_up", "accepted_tokens", "accepted_before", "bytes_down", "parameters_down", "bytes_whole", "pending", "missed", "undone_tokens")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    MERGED_TOKEN_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_UP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_DOWN_FIELD_NUMBER: _ClassVar[int]
    BYTES_WHOLE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    UNDONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    learner: str
    merged_token_parameters: str
    bytes_up: int
    parameters_up: int
    accepted_tokens: float
    accepted_before: float
    bytes_down: int
    parameters_down: int
    bytes_whole: int
    pending: int
    missed: int
    undone_tokens: float
    def __init__(self, learner: _Optional[str] = ..., merged_token_parameters: _Optional[str] = ..., bytes_up: _Optional[int] = ..., parameters_up: _Optional[int] = ..., accepted_tokens: _Optional[float] = ..., accepted_before: _Optional[float] = ..., bytes_down: _Optional[int] = ..., parameters_down: _Optional[int] = ..., bytes_whole: _Optional[int] = ..., pending: _Optional[int] = ..., missed: _Optional[int] = ..., undone_tokens: _Optional[float] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run", "generation", "epoch", "secret", "start", "settings", "checkpoint")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run: str
    generation: int
    epoch: int
    secret: bytes
    start: bytes
    settings: str
    checkpoint: int
    def __init__(self, run: _Optional[str] = ..., generation: _Optional[int] = ..., epoch: _Optional[int] = ..., secret: _Optional[bytes] = ..., start: _Optional[bytes] = ..., settings: _Optional[str] = ..., checkpoint: _Optional[int] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("sha256", "tensors", "fragments", "fingerprint", "owned")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    tensors: str
    fragments: int
    fingerprint: bytes
    owned: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sha256: _Optional[bytes] = ..., tensors: _Optional[str] = ..., fragments: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., owned: _Optional[_Iterable[int]] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("stage", "settings")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    stage: Stage
    settings: str
    def __init__(self, stage: _Optional[_Union[Stage, _Mapping]] = ..., settings: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("learner", "region", "incarnation", "session", "evicted", "left")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    learner: str
    region: str
    incarnation: int
    session: int
    evicted: str
    left: bool
    def __init__(self, learner: _Optional[str] = ..., region: _Optional[str] = ..., incarnation: _Optional[int] = ..., session: _Optional[int] = ..., evicted: _Optional[str] = ..., left: bool = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("epoch", "sequence", "run_tokens", "voided_tokens", "paused", "slot", "slot_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOIDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    run_tokens: int
    voided_tokens: int
    paused: str
    slot: float
    slot_s: float
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., run_tokens: _Optional[int] = ..., voided_tokens: _Optional[int] = ..., paused: _Optional[str] = ..., slot: _Optional[float] = ..., slot_s: _Optional[float] = ...) -> None: ...

class AwaitedLease(_message.Message):
    __slots__ = ("lease", "learner", "incarnation", "over")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    lease: int
    learner: str
    incarnation: int
    over: bool
    def __init__(self, lease: _Optional[int] = ..., learner: _Optional[str] = ..., incarnation: _Optional[int] = ..., over: bool = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("snapshots", "through")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedScalarFieldContainer[int]
    through: int
    def __init__(self, snapshots: _Optional[_Iterable[int]] = ..., through: _Optional[int] = ...) -> None: ...

class FetchInitialRequest(_message.Message):
    __slots__ = ("shard", "sha256")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    shard: int
    sha256: bytes
    def __init__(self, shard: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class FetchInitialReply(_message.Message):
    __slots__ = ("chunk", "sha256")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    sha256: bytes
    def __init__(self, chunk: _Optional[bytes] = ..., sha256: _Optional[bytes] = ...) -> None: ...
