"""Settings of a run and of a core process: validated once, at the edge, and plain values from there on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from atoll_wire import scrape
from atoll_wire.access import LOCAL, Access
from atoll_wire.codec import Codec
from atoll_wire.contract import UPDATES_KEPT
from atoll_wire.errors import SettingsError
from atoll_wire.frames import TENSORS
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator


class Quorum(BaseModel):
    """The least number of contributions that may close a round: a number of learners, or a share of the live ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learners: Annotated[int, Field(ge=1)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 0.5

    def of(self, live: int) -> int:
        """K for `live` learners; never more than there are, never less than one."""
        wanted = self.learners if self.learners is not None else math.ceil(self.share * live)
        return max(1, min(wanted, live))

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


class RunSettings(BaseModel):
    """What all learners of a run share; kept with its state, told to each learner when it joins."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inner_steps: Annotated[int, Field(ge=1, le=100_000)] = 24
    fragments: Annotated[int, Field(ge=0, le=4096)] = 0  # 0: what the tensors allow, at most 24
    overlap_steps: Annotated[float, Field(gt=0, le=1000)] = 4.0  # an answer and an adoption wait for steps to end
    quorum: Quorum = Quorum()
    grace_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.8
    staleness_exponent: Annotated[float, Field(ge=0, le=10)] = 0.5
    max_staleness: Annotated[int, Field(ge=0, le=1_000_000)] = 4
    outer_lr: Annotated[float, Field(gt=0, le=10)] = 0.5
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.85
    # outer steps of a fragment until the momentum is full: early pseudo-gradients point elsewhere
    outer_warm_up: Annotated[int, Field(ge=0, le=1_000_000)] = 25
    outer_cool_down: Annotated[float, Field(ge=0, le=1)] = 0.1  # last part of total_tokens, see `heat`
    total_tokens: Annotated[int, Field(ge=0, le=1 << 60)] = 0  # of the run, all learners together; 0: not known
    norm_limit: Annotated[float, Field(ge=0, le=1e6)] = 100.0  # times what is usual; 0: none
    clip_norm: Annotated[float, Field(ge=0, le=1e6)] = 10.0  # the same; 0: nothing is clipped
    codec: Codec = Codec.INT4
    # What is kept on disk is the run's own, so that a start which does not say it deletes nothing.
    keep_snapshots: Annotated[int, Field(ge=2)] = 3  # a payload may go only when two snapshots cover it
    record: bool = False  # keep every payload, so that the whole run can be replayed

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
        merged = self.model_dump() | {name: value for name, value in given.items() if value is not None}
        try:
            return RunSettings.model_validate(merged)
        except ValidationError as error:
            raise _named(error) from error


class Limits(BaseModel):
    """What a core takes at most, whatever learners send. Reached: RESOURCE_EXHAUSTED, and the learner tries later."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learners: int = 4096  # names a run can ever have
    tensors: int = TENSORS
    tensor_name_bytes: int = 512
    parameters: int = 1 << 36  # trainable ones of the model
    tokens: int = 1 << 50  # that one learner may say it has trained; steps as well
    model_bytes: int = 1 << 40  # of the file with the first parameters
    spool_bytes: int = 64 << 30
    learner_spool_bytes: int = 16 << 30  # of one learner, from its first frame to its fate
    norm_window: int = 32  # contributions of a fragment whose running median is what is usual
    calls: int = 16_384  # at a time, of any kind
    headroom_bytes: int = 64 << 20  # of disk, beside a snapshot: kept free for the ledger
    receipts: int = 10_000  # in one answer
    contents_bytes: int = 32 << 20  # of decompressed contributions in memory; the others are read again at the merge
    update_cache_bytes: int = 48 << 20  # published updates kept for learners that are behind; 0.4 bytes a parameter
    update_cache_versions: int = UPDATES_KEPT  # of each fragment, while there is room
    upload_idle_s: float = 60.0  # an upload without a frame for so long loses its reservation
    lease_s: float = 60.0  # to begin sending the first parameters
    turn_s: float = 600.0  # to send them all, while another learner waits to; twice as long with each turn of a name
    happenings: int = 4096  # kept for followers that are behind; others get the current state


class CoreSettings(BaseModel):
    """One core process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: tuple[str, ...]
    directory: Path
    init: Path | None = None
    metrics_listen: str | None = None
    access: Access = LOCAL
    metrics_plaintext: bool = False
    operator_tokens: Path | None = None
    snapshot_every_s: Annotated[float, Field(gt=0)] = 120.0
    standby: bool = False  # wait, warm, for a directory that another core has
    wan_budget_gb: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.0  # a month, both ways; 0: none
    memory_gib: Annotated[float | None, Field(gt=0)] = None  # that it may take; None: what the machine has
    limits: Limits = Limits()

    @property
    def memory_bytes(self) -> int | None:
        """The same in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)

    @classmethod
    def of(cls, **values: Any) -> CoreSettings:  # noqa: ANN401
        """Settings from a command line; SettingsError names what cannot be."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise _named(error) from error

    def check(self) -> None:
        """Refuses an address that would offer the run to a network in plain text."""
        self.access.check(self.listen)
        scrape.check(self.metrics_listen, plaintext=self.metrics_plaintext)
        if self.init is not None and not self.init.is_file():
            raise SettingsError(f"--init {self.init} cannot be read: give a safetensors file of the model")


def _named(error: ValidationError) -> SettingsError:
    first = error.errors()[0]
    name = "--" + str(first["loc"][0]).replace("_", "-")
    wrong = first["msg"].lower().removeprefix("value error, ")
    return SettingsError(f"{name} {first['input']}: {wrong}; see atoll core --help")
