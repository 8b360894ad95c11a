"""PURE: the ledger's rows as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from atoll_wire.contract import Fate

from atoll_server.data.merged_units import MergedUnits, UnitRange, with_merged
from atoll_server.rounds.syncer_events import ContributionKey


@dataclass(frozen=True, slots=True)
class ContributionRow:
    """The values of an acknowledged contribution, which do not change."""

    key: ContributionKey
    cycle: int
    base_version: int
    tokens: int
    steps: int
    codec: int
    frames: int
    size_bytes: int
    digest: bytes
    norms_sq: tuple[float, ...]
    scale: float  # factor that clips the contribution, from 0 to 1
    accepted_at: float  # wall-clock seconds, for people
    units: tuple[UnitRange, ...] = ()  # data units whose training ended in these steps


@dataclass(frozen=True, slots=True)
class FateRow:
    """A contribution's fate. weight, staleness: as used in its merge.

    version: the version that its merge produced, or the fragment's version when it was refused. dropped: whether the
    learner must discard the work of a refused contribution.
    """

    key: ContributionKey
    fate: Fate
    version: int = 0
    weight: float = 0.0
    staleness: float = 0.0
    reason: str = ""
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class TotalsRow:
    """Sums over the merged and refused contributions from one incarnation of a learner to one fragment.

    through: number of the last contribution that the sums include. tokens: tokens of merged contributions. seq, cycle:
    the highest seq and cycle. units: data units in merged contributions, keyed by lease.
    """

    learner: str
    incarnation: int
    fragment: int
    through: int = 0
    merged: int = 0
    refused: int = 0
    tokens: int = 0
    size_bytes: int = 0
    seq: int = 0
    cycle: int = 0
    units: dict[int, MergedUnits] = field(default_factory=dict)

    def plus(self, number: int, row: ContributionRow, fate: FateRow) -> TotalsRow:
        """Returns these sums after adding one more contribution, which is newer than all those included."""
        merged = fate.fate is Fate.MERGED
        return replace(
            self,
            through=number,
            merged=self.merged + merged,
            refused=self.refused + (not merged),
            tokens=self.tokens + row.tokens * merged,
            size_bytes=self.size_bytes + row.size_bytes,
            seq=max(self.seq, row.key.seq),
            cycle=max(self.cycle, row.cycle),
            units=with_merged(self.units, row.units) if merged else self.units,
        )


@dataclass(frozen=True, slots=True)
class MergeRow:
    """One merge. shares: (learner, incarnation, seq, weight, staleness), in merge order.

    run_tokens, voided_tokens: values in the shard's view of the run when the merge began, which a replay needs. theta,
    theta_pub, momentum: CRC-32C checksums of the merged values. merged_at: wall-clock seconds.
    """

    fragment: int
    version: int
    cycle: int
    shares: tuple[tuple[str, int, int, float, float], ...]
    rule: dict[str, Any]
    run_tokens: int
    voided_tokens: int
    theta: int
    theta_pub: int
    momentum: int
    update_bytes: int
    merged_at: float


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """A snapshot. versions: version of each fragment. checksums: of theta, theta_pub and momentum of each fragment.

    tokens: counted tokens of each learner when the snapshot was taken. datasets: accounts of the datasets at that time,
    from which a restored run continues (see `data_ledger`).
    """

    id: int
    generation: int
    versions: dict[int, int]
    checksums: dict[int, tuple[int, int, int]]
    tokens: dict[str, int]
    taken_at: float
    size_bytes: int
    datasets: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """A learner that has joined this run."""

    name: str
    region: str
    incarnation: int
    nonces: list[int]
    account: dict[str, Any]
    evicted: str  # reason for the eviction; empty if not evicted
