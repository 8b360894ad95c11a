"""Settings of a run and of a core process. A process validates its settings once, at startup."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from atoll_wire.contract import UPDATES_KEPT
from atoll_wire.errors import SettingsError, UsageError
from atoll_wire.layout.frame_spans import Codec, Compression
from atoll_wire.layout.sharding import MAX_SHARDS
from atoll_wire.messages.frame_messages import TENSORS
from atoll_wire.messages.message_parts import MESSAGE_BYTES
from atoll_wire.process import metrics_server
from atoll_wire.process.settings import Address, Bytes, Certificates, Count, Metrics, Option, Settings
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from atoll_server.access.quotas import Quotas, Reading, Watching
from atoll_server.quorum import Quorum


class RunSettings(Settings):
    """Settings of a run, which are the same for all learners.

    The core stores them in the run's directory and sends them to each learner that joins.
    """

    command: ClassVar[str] = "core"
    panel: ClassVar[str] = "Run settings (stored with the run; a new value replaces the stored one)"

    inner_steps: Annotated[int, Field(ge=1, le=100_000, description="H: inner steps between syncs of a fragment.")] = 24
    fragments: Annotated[
        int, Field(ge=0, le=4096, description="P: number of fragments. 0: as many as the tensors allow, at most 24.")
    ] = 0
    overlap_steps: Annotated[
        float, Field(gt=0, le=1000, description="tau: inner steps that a sync may take."), Option(name="overlap")
    ] = 4.0  # several steps, since learners contribute and adopt updates only at the end of a step
    quorum: Annotated[
        Quorum,
        Field(description="K: number or share of live learners whose contributions let a round close: 3, 0.5 or 50%."),
        Option(metavar="<text>"),
    ] = Quorum()
    grace_ratio: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="gamma: fraction of a sync's spare time that a round waits after its quorum. 0: no wait.",
        ),
    ] = 0.8
    staleness_exponent: Annotated[
        float,
        Field(ge=0, le=10, description="a: a contribution's weight is multiplied by max(1, staleness)^-a."),
    ] = 0.5
    max_staleness: Annotated[
        int, Field(ge=0, le=1_000_000, description="Largest accepted staleness, in outer steps.")
    ] = 4
    outer_lr: Annotated[float, Field(gt=0, le=10, description="Outer learning rate.")] = 0.5
    outer_momentum: Annotated[float, Field(ge=0, lt=1, description="Outer Nesterov momentum.")] = 0.85
    outer_warm_up: Annotated[
        int,
        Field(ge=0, le=1_000_000, description="Outer steps until a fragment's momentum reaches --outer-momentum."),
    ] = 25  # since early pseudo-gradients point in different directions
    outer_cool_down: Annotated[
        float,
        Field(ge=0, le=1, description="Final fraction of --total-tokens over which outer steps become plain means."),
    ] = 0.1  # see `heat`
    total_tokens: Annotated[
        Count,
        Field(
            ge=0,
            le=1 << 60,
            description="Training tokens of the whole run, for all learners together. 0: unknown.",
        ),
    ] = 0
    norm_limit: Annotated[
        float,
        Field(
            ge=0,
            le=1e6,
            description="Refuse contributions whose norm is above this multiple of the usual norm. 0: no limit.",
        ),
    ] = 100.0
    clip_norm: Annotated[
        float,
        Field(ge=0, le=1e6, description="Scale larger norms down to this multiple of the usual norm. 0: no limit."),
    ] = 10.0
    weight_limit: Annotated[
        float,
        Field(
            ge=1,
            le=1e6,
            description="Limit on a learner's weight, as a multiple of the other learners' median weight.",
        ),
    ] = 10.0  # islands of one run differ in size; 1 gives no learner more influence than the others
    codec: Annotated[Codec, Field(description="Encoding of contributions and published updates.")] = Codec.INT4
    compression: Annotated[
        Compression, Field(description="Compress payloads: always, never, or auto (not on short, fast links).")
    ] = Compression.AUTO
    # The next two settings are stored with the run, so that a start without these options deletes no data.
    keep_snapshots: Annotated[int, Field(ge=2, description="Number of snapshots to keep.")] = (
        3  # at least 2, since a payload is deleted only after two snapshots cover it
    )
    record: Annotated[
        bool,
        Field(
            description="Keep every payload, so that the run can be replayed. --no-record deletes the kept payloads."
        ),
    ] = False

    def heat(self, tokens: int) -> float:
        """Returns the heat of an outer step, from 1 (Nesterov step) to 0 (plain mean).

        The heat falls linearly from 1 to 0 over the last `outer_cool_down` x `total_tokens` tokens. If one of these
        settings is 0, the heat stays 1.
        tokens: number of tokens that all learners together have trained on so far.
        """
        if not self.total_tokens:
            return 1.0
        left = max(0.0, 1 - tokens / self.total_tokens)
        return min(1.0, left / self.outer_cool_down) if self.outer_cool_down else 1.0

    def outer_at(self, age: float, heat: float) -> tuple[float, float]:
        """Returns the learning rate and the momentum of one outer step.

        age: the new version's age in outer steps (see RoundState.age). The momentum grows until the age is
        `outer_warm_up`.
        heat: 1 for a Nesterov step, 0 for a plain mean (see `heat`).
        """
        grown = min(1.0, age / self.outer_warm_up) if self.outer_warm_up else 1.0
        return heat * self.outer_lr + (1 - heat), heat * grown * self.outer_momentum

    @field_validator("quorum", mode="before")
    @classmethod
    def _quorum_by_text(cls, value: object) -> object:
        return Quorum.parse(value) if isinstance(value, str) else value

    @field_validator("codec", "compression", mode="before")
    @classmethod
    def _by_name(cls, value: object, info: ValidationInfo) -> object:
        names: type[IntEnum] = Codec if info.field_name == "codec" else Compression
        if isinstance(value, str) and value.upper() not in names.__members__:
            raise ValueError(f"give {', '.join(names.__members__).lower()}")
        return names[value.upper()] if isinstance(value, str) else value

    def changed(self, **given: Any) -> RunSettings:  # noqa: ANN401
        """Returns a copy with the given settings replaced. A setting that is None keeps its value.

        Raises SettingsError for an invalid value.
        """
        return RunSettings.of(**self.model_dump() | {name: value for name, value in given.items() if value is not None})


FINETUNE = {"inner_steps": 12}  # the default H leaves a short run few outer steps; see docs/guides/tune.md#presets
PRESETS: dict[str, dict[str, Any]] = {
    "pretrain": {name: RunSettings.model_fields[name].default for name in FINETUNE},
    "finetune": FINETUNE,
}


class Serving(Certificates, Metrics):
    """Settings of a process that serves gRPC: a core or a front."""

    revoked: Annotated[Path | None, Field(description="File of revoked certificates (see atoll certs list).")] = None

    def check_reach(self, *addresses: str) -> None:
        """Raises SettingsError if the process would serve plain text on a non-loopback address without permission.

        addresses: the addresses on which gRPC listens. The method also checks the address for the metrics.
        """
        self.security.check(addresses)
        metrics_server.check(self.metrics_listen, plaintext=self.metrics_plaintext)


class ServerLimits(Settings):
    """Limits of a server that apply to all its callers together."""

    panel: ClassVar[str] = "Limits"
    prefix: ClassVar[str] = "limit"

    calls: Annotated[int, Field(ge=64, le=1 << 20, description="Concurrent calls of all kinds.")] = 16_384
    readers: Watching = 4096
    reads: Reading = 4096
    message_bytes: Annotated[
        Bytes,
        Field(
            ge=MESSAGE_BYTES,
            le=64 << 20,
            description="Largest accepted message. Atoll sends larger messages in pieces.",
        ),
    ] = MESSAGE_BYTES


class Limits(ServerLimits):
    """Limits of a core on learners, model sizes, disk space, memory and waiting times."""

    readers: Watching = 64  # more readers need a front, so that they do not load the core
    reads: Reading = 128
    learners: Annotated[int, Field(ge=1, le=1 << 16, description="Largest number of learner names in a run.")] = 4096
    tensors: Annotated[int, Field(ge=1, le=TENSORS, description="Largest number of trainable tensors.")] = TENSORS
    tensor_name_bytes: int = 512
    parameters: Annotated[Count, Field(ge=1, le=1 << 40, description="Largest number of trainable parameters.")] = (
        1 << 36
    )
    tokens: int = 1 << 50  # largest number of tokens, and of steps, that a learner may report
    model_bytes: Annotated[
        Bytes, Field(ge=1, le=1 << 50, description="Largest size of the initial parameters' file.")
    ] = 1 << 40
    spool_bytes: Annotated[
        Bytes,
        Field(ge=1, le=1 << 50, description="Disk space for contributions, until two snapshots include their merge."),
    ] = 64 << 30
    learner_spool_bytes: Annotated[
        Bytes, Field(ge=1, le=1 << 50, description="Disk space for one learner's contributions that wait for a merge.")
    ] = 16 << 30
    norm_window: int = 32  # the usual norm of a fragment is the median over this many contributions
    headroom_bytes: Annotated[
        Bytes,
        Field(ge=1 << 20, le=1 << 50, description="Disk space to keep free for the ledger, in addition to a snapshot."),
    ] = 64 << 20
    receipts: int = 10_000  # limit on the receipts in one reply to an operator
    contents_bytes: Annotated[
        Bytes,
        Field(ge=0, le=1 << 50, description="Memory for decompressed contributions. Merges read the rest from disk."),
    ] = 8 << 20
    update_cache_bytes: Annotated[
        Bytes,
        Field(
            ge=0,
            le=1 << 50,
            description="Memory for published updates. The core uses at least 0.54 bytes per parameter.",
        ),
    ] = 48 << 20
    update_cache_versions: Annotated[
        int,
        Field(
            ge=1, le=4096, description="Updates kept per fragment. Learners further behind fetch the whole fragment."
        ),
    ] = UPDATES_KEPT
    upload_idle_s: Annotated[
        float,
        Field(
            gt=0,
            le=86_400,
            description="Seconds without a new frame after which an upload loses its reserved disk space.",
        ),
    ] = 60.0
    units_silence_s: Annotated[
        float, Field(gt=0, le=604_800, description="Seconds of silence after which a learner loses its data units.")
    ] = 300.0
    lease_s: Annotated[
        float,
        Field(
            gt=0,
            le=86_400,
            description="Seconds within which the chosen learner must send each MiB of the initial parameters.",
        ),
    ] = 60.0
    turn_s: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="Seconds for the chosen learner to send all initial parameters while another learner waits.",
        ),
    ] = 600.0  # doubles each time the same learner is chosen
    notifications: int = 4096  # limit on those kept for Follow calls; learners further behind get the full state


class ShardNumber(BaseModel):
    """A shard's number, starting from 0, and the number of shards of the run. Its text form is, for example, 2/4."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=1, le=MAX_SHARDS)]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> ShardNumber:
        """Returns the shard that a text such as "2/4" names. Raises UsageError."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count) <= MAX_SHARDS):
            raise UsageError(
                f'--shard "{text}" is not a shard: give its number from 0 and the number of shards, such as 2/4'
            )
        return cls(number=int(number), count=int(count))


class CoreSettings(Serving):
    """Settings of one core process, which are not stored with the run."""

    command: ClassVar[str] = "core"

    directory: Annotated[Path, Field(description="Directory of the run."), Option(name="dir")]
    listen: Annotated[
        tuple[str, ...],
        Field(description="Addresses to listen on. Port 0: any free port."),
        Option(metavar="HOST:PORT"),
    ] = ("127.0.0.1:7070",)
    init: Annotated[
        Path | None,
        Field(
            description="Initial parameters: a safetensors file of the model's state_dict, or a folder of such files "
            "with an index. Without this option, the first learner sends its parameters."
        ),
    ] = None
    operator_tokens: Annotated[Path | None, Field(description="File of operator tokens (see atoll token).")] = None
    snapshot_every_s: Annotated[
        float,
        Field(
            gt=0,
            description="Longest time between snapshots, in seconds. "
            "The core may take a snapshot earlier to keep restarts fast.",
        ),
    ] = 120.0
    wan_budget_gb: Annotated[
        float,
        Field(
            ge=0,
            le=1e9,
            description="WAN budget in GB per month, uploads plus downloads. "
            "An alert fires above the budget. 0: no budget.",
        ),
    ] = 0.0
    memory: Annotated[
        Bytes | None,
        Field(ge=1 << 20, description="Memory for the core (default: all). The core refuses models that need more."),
    ] = None
    standby: Annotated[bool, Field(description="Wait while another core uses the directory, then take over.")] = False
    shard: Annotated[
        ShardNumber | None,
        Field(
            description="This shard's number, and the number of shards: 0/4 to 3/4. "
            "Without --registrar, shard 0 is also the registrar."
        ),
        Option(metavar="K/N", panel="One run on several cores"),
    ] = None
    registrar: Annotated[
        Address | None,
        Field(description="Address of the registrar, for a shard that is not the registrar itself."),
        Option(metavar="HOST:PORT", panel="One run on several cores"),
    ] = None
    registrar_only: Annotated[
        bool,
        Field(
            description="Run only the registrar, without fragments. Shard 0 is then another process with --registrar."
        ),
        Option(panel="One run on several cores"),
    ] = False
    advertise: Annotated[
        str,
        Field(description="Address at which learners and fronts reach this shard (default: the first --listen)."),
        Option(metavar="HOST:PORT", panel="One run on several cores"),
    ] = ""
    preset: Annotated[
        Literal["pretrain", "finetune"] | None,
        Field(
            description="pretrain: the default H. finetune: a smaller H, for short runs and adapters. "
            "--inner-steps overrides it."
        ),
        Option(panel=RunSettings.panel),
    ] = None
    limits: Limits = Limits()
    quotas: Quotas = Quotas()

    @property
    def shards(self) -> int:
        """The number of shards of the run; 0 if it is unknown to this process."""
        return 0 if self.registrar_only else 1 if self.shard is None else self.shard.count

    def run_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the run settings that this start sets: those of the preset and those given, which take precedence."""
        preset = PRESETS[self.preset] if self.preset else {}
        return preset | {name: value for name, value in given.items() if value is not None}

    @field_validator("shard", mode="before")
    @classmethod
    def _shard_by_text(cls, value: object) -> object:
        return ShardNumber.parse(value) if isinstance(value, str) else value

    def check(self) -> None:
        """Raises SettingsError for contradictory options, a missing --init and in the same cases as `check_reach`."""
        self.check_reach(*self.listen)
        if self.shard is not None and self.registrar_only:
            raise UsageError("--shard and --registrar-only cannot be combined: give only one of them")
        if self.registrar is not None and self.shard is None:
            raise UsageError("--registrar needs --shard, such as --shard 1/4: add it, or omit --registrar")
        if self.shard is not None and self.shard.number and self.registrar is None:
            raise UsageError(f"--shard {self.shard} needs the address of the registrar: add --registrar HOST:PORT")
        if self.registrar is not None and self.init is not None:
            raise UsageError("--init belongs to the registrar: omit it for other shards")
        if self.registrar is not None:
            self.security.check([self.registrar])
        if self.init is not None and not (self.init.is_file() or self.init.is_dir()):
            raise SettingsError(f"--init {self.init} cannot be read: give a safetensors file or folder of the model")
