"""Reads and writes the checkpoints of a run with several shards, and the snapshots that a shard keeps for them.

A checkpoint of such a run is a manifest in the registrar's ledger, which names one snapshot of each shard. The manifest
is written after all these snapshots are durable, so an interrupted checkpoint leaves no manifest. Functions here read
or write values of the run within their caller's transaction (see ledger_writer.py).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from atoll_server.ledger import run_ledger

MANIFESTS, RESTORED, KEPT = "checkpoints", "restored_checkpoint", "kept_snapshots"  # keys in the table meta


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint of a run with several shards.

    own: number of the registrar's own shard. snapshots: number of each shard's snapshot, keyed by shard. versions:
    version of each fragment of the run. taken_at: wall-clock seconds. datasets: as in SnapshotRow.
    """

    id: int
    generation: int
    own: int
    snapshots: dict[int, int]
    versions: dict[int, int]
    taken_at: float
    size_bytes: int
    datasets: list[Any] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """Returns JSON values for the ledger."""
        return asdict(self) | {"snapshots": [*self.snapshots.items()], "versions": [*self.versions.items()]}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Manifest:
        return cls(**(data | {"snapshots": dict(data["snapshots"]), "versions": dict(data["versions"])}))


@dataclass(frozen=True, slots=True)
class RestoredManifest:
    """The manifest from which a generation began. snapshots: as in Manifest."""

    generation: int
    checkpoint: int
    snapshots: dict[int, int]


@dataclass(frozen=True, slots=True)
class KeptSnapshots:
    """The snapshots that a shard keeps because a manifest names them or may soon name them.

    through: number of the newest snapshot that the registrar has told the shard about. A newer snapshot may belong to a
    manifest that is not written yet.
    """

    snapshots: frozenset[int] = frozenset()
    through: int = 0

    def plus(self, snapshot: int) -> KeptSnapshots:
        """Returns these snapshots together with a new one."""
        return replace(self, snapshots=self.snapshots | {snapshot})

    def told(self, snapshots: frozenset[int], through: int) -> KeptSnapshots:
        """Returns the snapshots to keep. snapshots: snapshots up to `through` that the registrar's manifests name."""
        newer = {each for each in self.snapshots if each > through}
        return KeptSnapshots(snapshots | newer, through)


def manifests_of(meta: dict[str, Any]) -> list[Manifest]:
    """Returns a run's manifests, oldest first. meta: the run's values in the ledger."""
    return [Manifest.from_data(each) for each in meta.get(MANIFESTS, [])]


def put_manifests(db: sqlite3.Connection, manifests: Sequence[Manifest]) -> None:
    """Replaces the run's manifests."""
    run_ledger.put_meta(db, MANIFESTS, [each.as_data() for each in manifests])


def restored_of(meta: dict[str, Any]) -> RestoredManifest | None:
    """Returns the manifest from which the run's generation began; None if it began without one."""
    data = meta.get(RESTORED)
    if data is None or data["generation"] != meta["generation"]:
        return None
    return RestoredManifest(data["generation"], data["checkpoint"], dict(data["snapshots"]))


def put_restored(db: sqlite3.Connection, restored: RestoredManifest) -> None:
    """Records the manifest from which a new generation begins."""
    run_ledger.put_meta(db, RESTORED, asdict(restored) | {"snapshots": [*restored.snapshots.items()]})


def kept_of(meta: dict[str, Any]) -> KeptSnapshots:
    """Returns the snapshots that this directory's shard keeps."""
    data = meta.get(KEPT)
    return KeptSnapshots() if data is None else KeptSnapshots(frozenset(data["snapshots"]), data["through"])


def put_kept(db: sqlite3.Connection, kept: KeptSnapshots) -> None:
    run_ledger.put_meta(db, KEPT, {"snapshots": sorted(kept.snapshots), "through": kept.through})


def dropped(manifests: Sequence[Manifest], generation: int, keep: int) -> list[Manifest]:
    """Returns the manifests that the run no longer needs, oldest first.

    generation: the current generation. keep: number of newest manifests to keep. After a restore, all manifests are
    kept until the new generation has two, so that the restore can be undone.
    """
    mine = [each for each in manifests if each.generation == generation]
    if len(mine) < 2 and len(mine) < len(manifests):
        return []
    return list(manifests[: max(0, len(manifests) - keep)])
