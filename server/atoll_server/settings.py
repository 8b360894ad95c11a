"""Settings of a run and of a core process: validated once, at the edge, and plain values from there on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar

from atoll_wire.contract import UPDATES_KEPT
from atoll_wire.errors import SettingsError
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.messages.frame_messages import TENSORS
from atoll_wire.messages.message_parts import MESSAGE_BYTES
from atoll_wire.process import metrics_server
from atoll_wire.process.settings import Bytes, Certificates, Metrics, Option, Settings
from pydantic import BaseModel, ConfigDict, Field, field_validator

from atoll_server.access.quotas import Quotas


class Quorum(BaseModel):
    """The least number of contributions that may close a round: a number of learners, or a share of the live ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learners: Annotated[int, Field(ge=1)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 0.5

    def of(self, live: int) -> int:
        """K for `live` learners; never more than there are, never less than one."""
        wanted = self.learners if self.learners is not None else math.ceil(self.share * live)
        return max(1, min(wanted, live))

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{100 * self.share:g}%" if self.learners is None else str(self.learners)

    @classmethod
    def parse(cls, text: str) -> Quorum:
        """Reads "3" as three learners, "0.5" or "50%" as half of the live ones."""
        try:
            if text.endswith("%"):
                return cls(share=float(text[:-1]) / 100)
            return cls(share=float(text)) if "." in text else cls(learners=int(text))
        except ValueError as error:
            raise SettingsError(
                f'quorum "{text}" is neither a number of learners nor a share: give 3, 0.5 or 50%'
            ) from error


class RunSettings(Settings):
    """What all learners of a run share; kept with its state, told to each learner when it joins."""

    command: ClassVar[str] = "core"
    panel: ClassVar[str] = "Run settings (kept with the run; given again, they replace what it has)"

    inner_steps: Annotated[int, Field(ge=1, le=100_000, description="H: inner steps between syncs of a fragment.")] = 24
    fragments: Annotated[
        int, Field(ge=0, le=4096, description="P: fragments. 0: what the tensors allow, at most 24.")
    ] = 0
    overlap_steps: Annotated[
        float, Field(gt=0, le=1000, description="tau: inner steps that a sync may take."), Option(name="overlap")
    ] = 4.0  # an answer and an adoption wait for steps to end
    quorum: Annotated[
        Quorum, Field(description="K: learners, or a share of the live ones: 3, 0.5 or 50%."), Option(metavar="<text>")
    ] = Quorum()
    grace_ratio: Annotated[
        float,
        Field(ge=0, lt=1, description="gamma: part of the slack that a round waits longer. 0: rounds do not wait."),
    ] = 0.8
    staleness_exponent: Annotated[
        float, Field(ge=0, le=10, description="a: the weight of a late contribution falls as staleness^-a.")
    ] = 0.5
    max_staleness: Annotated[
        int, Field(ge=0, le=1_000_000, description="Outer steps; a contribution beyond it is refused.")
    ] = 4
    outer_lr: Annotated[float, Field(gt=0, le=10, description="Outer learning rate.")] = 0.5
    outer_momentum: Annotated[float, Field(ge=0, lt=1, description="Outer Nesterov momentum.")] = 0.85
    outer_warm_up: Annotated[
        int,
        Field(ge=0, le=1_000_000, description="Outer steps of a fragment in which the outer momentum grows to that."),
    ] = 25  # early pseudo-gradients point elsewhere
    outer_cool_down: Annotated[
        float,
        Field(ge=0, le=1, description="Last part of --total-tokens, in which outer steps become plain means."),
    ] = 0.1  # see `heat`
    total_tokens: Annotated[
        int, Field(ge=0, le=1 << 60, description="Tokens that all learners together are to train. 0: not known.")
    ] = 0
    norm_limit: Annotated[
        float,
        Field(ge=0, le=1e6, description="A contribution so many times larger than usual is refused. 0: none is."),
    ] = 100.0
    clip_norm: Annotated[
        float,
        Field(ge=0, le=1e6, description="One so many times larger than usual is scaled down to that. 0: none is."),
    ] = 10.0
    codec: Annotated[Codec, Field(description="How values travel, both ways.")] = Codec.INT4
    # What is kept on disk is the run's own, so that a start which does not say it deletes nothing.
    keep_snapshots: Annotated[int, Field(ge=2, description="Snapshots kept.")] = (
        3  # a payload may go only when two snapshots cover it
    )
    record: Annotated[
        bool,
        Field(description="Keep every payload, so that the run can be replayed; --no-record deletes what was kept."),
    ] = False

    def heat(self, tokens: int) -> float:
        """1 while the run goes on; falls to 0 over the last part of its tokens. tokens: trained so far."""
        if not self.total_tokens:
            return 1.0
        left = max(0.0, 1 - tokens / self.total_tokens)
        return min(1.0, left / self.outer_cool_down) if self.outer_cool_down else 1.0

    def outer_at(self, age: float, heat: float) -> tuple[float, float]:
        """Rate and momentum of the outer step that makes a version of this age; at no heat it is a plain mean."""
        grown = min(1.0, age / self.outer_warm_up) if self.outer_warm_up else 1.0
        return heat * self.outer_lr + (1 - heat), heat * grown * self.outer_momentum

    @field_validator("quorum", mode="before")
    @classmethod
    def _quorum_by_text(cls, value: object) -> object:
        return Quorum.parse(value) if isinstance(value, str) else value

    @field_validator("codec", mode="before")
    @classmethod
    def _codec_by_name(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.upper() not in Codec.__members__:
            raise ValueError("give int4, int8 or float32")
        return Codec[value.upper()]

    def changed(self, **given: Any) -> RunSettings:  # noqa: ANN401
        """These settings with the given ones (None: not given) in place; SettingsError names what cannot be."""
        return RunSettings.of(**self.model_dump() | {name: value for name, value in given.items() if value is not None})


class Serving(Certificates, Metrics):
    """What every server of the contract is told."""

    def check_reach(self, *addresses: str) -> None:
        """Refuses an address, or metrics, that would be offered to a network in plain text."""
        self.security.check(addresses)
        metrics_server.check(self.metrics_listen, plaintext=self.metrics_plaintext)


class ServerLimits(Settings):
    """What a server takes at most, of all callers together."""

    panel: ClassVar[str] = "Limits"
    prefix: ClassVar[str] = "limit"

    calls: Annotated[int, Field(ge=64, le=1 << 20, description="Calls at a time, of any kind.")] = 16_384
    message_bytes: Annotated[
        Bytes,
        Field(ge=MESSAGE_BYTES, le=64 << 20, description="Of one message that is received; Atoll cuts larger ones."),
    ] = MESSAGE_BYTES


class Limits(ServerLimits):
    """What a core takes at most, whatever learners send. Reached: RESOURCE_EXHAUSTED, and the learner tries later."""

    learners: Annotated[int, Field(ge=1, le=1 << 16, description="Names that a run can ever have.")] = 4096
    tensors: Annotated[int, Field(ge=1, le=TENSORS, description="Trainable tensors of the model.")] = TENSORS
    tensor_name_bytes: int = 512
    parameters: Annotated[int, Field(ge=1, le=1 << 40, description="Trainable parameters of the model.")] = 1 << 36
    tokens: int = 1 << 50  # that one learner may say it has trained; steps as well
    model_bytes: Annotated[Bytes, Field(ge=1, le=1 << 50, description="Of the file with the first parameters.")] = (
        1 << 40
    )
    spool_bytes: Annotated[
        Bytes, Field(ge=1, le=1 << 50, description="Of contributions that wait for their merge, on disk.")
    ] = 64 << 30
    learner_spool_bytes: Annotated[
        Bytes, Field(ge=1, le=1 << 50, description="Of one learner's, from a first frame to its fate.")
    ] = 16 << 30
    norm_window: int = 32  # contributions of a fragment whose running median is what is usual
    headroom_bytes: Annotated[
        Bytes, Field(ge=1 << 20, le=1 << 50, description="Of disk kept free for the ledger, beside a snapshot.")
    ] = 64 << 20
    receipts: int = 10_000  # in one answer
    contents_bytes: Annotated[
        Bytes,
        Field(ge=0, le=1 << 50, description="Of decompressed contributions in memory; a merge reads others again."),
    ] = 32 << 20
    update_cache_bytes: Annotated[
        Bytes, Field(ge=0, le=1 << 50, description="Of published updates in memory; at least 0.4 bytes per parameter.")
    ] = 48 << 20
    update_cache_versions: Annotated[
        int, Field(ge=1, le=4096, description="Updates of a fragment kept; a learner behind more fetches it whole.")
    ] = UPDATES_KEPT
    upload_idle_s: Annotated[
        float, Field(gt=0, le=86_400, description="Seconds; an upload without a frame loses its reservation.")
    ] = 60.0
    lease_s: Annotated[
        float, Field(gt=0, le=86_400, description="Seconds in which a learner begins to send the first parameters.")
    ] = 60.0
    turn_s: Annotated[
        float, Field(gt=0, le=1e6, description="Seconds to send them all, while another learner waits to.")
    ] = 600.0  # twice as long with each turn of a name
    notifications: int = 4096  # kept for followers that are behind; others get the current state


class CoreSettings(Serving):
    """One core process."""

    command: ClassVar[str] = "core"

    directory: Annotated[Path, Field(description="Where the run lives."), Option(name="dir")]
    listen: Annotated[
        tuple[str, ...], Field(description="Where it serves. Port 0: any free one."), Option(metavar="HOST:PORT")
    ] = ("127.0.0.1:7070",)
    init: Annotated[
        Path | None,
        Field(
            description="First parameters: a safetensors file of the model's state_dict. "
            "Without it the first learner sends its own."
        ),
    ] = None
    operator_tokens: Annotated[
        Path | None, Field(description="Operators need a token of this file, see atoll token.")
    ] = None
    snapshot_every_s: Annotated[
        float,
        Field(gt=0, description="Seconds between snapshots at most; an earlier one keeps the next start quick."),
    ] = 120.0
    wan_budget_gb: Annotated[
        float,
        Field(ge=0, le=1e9, description="GB that the WAN may carry in a month, both ways; more is an alert. 0: none."),
    ] = 0.0
    memory_gib: Annotated[
        float | None,
        Field(gt=0, description="Memory of the core, else what the machine has; a model that needs more is refused."),
    ] = None
    standby: Annotated[
        bool, Field(description="While another core has the directory wait, warm, and take over when it dies.")
    ] = False
    limits: Limits = Limits()
    quotas: Quotas = Quotas()

    @property
    def memory_bytes(self) -> int | None:
        """The same in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)

    def check(self) -> None:
        """Refuses an address that would offer the run to a network in plain text."""
        self.check_reach(*self.listen)
        if self.init is not None and not self.init.is_file():
            raise SettingsError(f"--init {self.init} cannot be read: give a safetensors file of the model")
