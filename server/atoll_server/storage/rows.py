"""PURE: rows of the ledger as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from atoll_wire.contract import Fate

from atoll_server.rounds.syncer_events import ContributionKey


@dataclass(frozen=True, slots=True)
class ContributionRow:
    """What never changes about an acknowledged contribution."""

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
    scale: float  # what it is clipped by
    accepted_at: float  # wall-clock seconds, for people


@dataclass(frozen=True, slots=True)
class FateRow:
    """What became of a contribution."""

    key: ContributionKey
    fate: Fate
    version: int = 0
    weight: float = 0.0
    staleness: float = 0.0
    reason: str = ""
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class TotalsRow:
    """What one incarnation of a learner sent to one fragment, as far as it has met its fate.

    through: number of the last contribution in it; tokens: of the merged ones; seq, cycle: the highest.
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

    def plus(self, number: int, row: ContributionRow, fate: FateRow) -> TotalsRow:
        """With one more, which came after all that are in it."""
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
        )


@dataclass(frozen=True, slots=True)
class MergeRow:
    """One merge. shares: (learner, incarnation, seq, weight, staleness), in merge order. Checksums: CRC-32C.

    run_tokens, voided_tokens: of the whole run, as the shard knew them when the merge began: an input of it.
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
    """A state file. versions, checksums: by fragment; a checksum for each of theta, theta_pub and momentum.

    tokens: that counted of each learner when it was taken.
    """

    id: int
    generation: int
    versions: dict[int, int]
    checksums: dict[int, tuple[int, int, int]]
    tokens: dict[str, int]
    taken_at: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LearnerRow:
    """A name that this run has seen."""

    name: str
    region: str
    incarnation: int
    nonces: list[int]
    account: dict[str, Any]
    evicted: str  # why; empty: it is not
