"""Rolls a run back to an older checkpoint, from which a new generation begins.

If the run has several shards, the registrar's directory is rolled back first. Each shard is rolled back when it
attaches. The whole change is one ledger transaction, so a crash leaves either the old generation or the new one.
Contributions merged after the checkpoint stay in the ledger under the old generation, so that receipts still list them,
but are no longer part of the run.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll_wire.contract import Fate
from atoll_wire.errors import SettingsError
from atoll_wire.layout.layout import Layout
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.checkpoints.restore import Origin
from atoll_server.checkpoints.snapshot import SnapshotError, load_snapshot, snapshot_path
from atoll_server.checkpoints.stopped_run import stopped_ledger
from atoll_server.learners.goodput import TimeAccount
from atoll_server.ledger import data_ledger, database, lineage, manifests, run_ledger, shard_ledger
from atoll_server.ledger.lineage import Beginning, Line
from atoll_server.ledger.manifests import Manifest, RestoredManifest
from atoll_server.ledger.rows import FateRow, LearnerRow, SnapshotRow, TotalsRow
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk

Sender = tuple[str, int, int]  # learner, incarnation, fragment
PER_GENERATION_S = 60.0  # assumed shortest time between two restores of a run


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The result of a rollback. row: the directory's snapshot. merges: merges of all shards up to this snapshot.

    generation: the generation that continues from the checkpoint. began: whether this rollback started the generation.
    shards: number of other shards, which must also be rolled back.
    """

    row: SnapshotRow
    merges: int
    generation: int
    began: bool
    shards: int = 0


def roll_back(
    directory: Path, checkpoint: int, disk: Disk = DISK, clock: Clock = SYSTEM, *, backup_at: float = 0.0
) -> RolledBack:
    """Rolls back the run in a core's directory to a checkpoint. Changes nothing if the run is already there.

    backup_at: time of the backup from which the directory was restored, in wall-clock seconds; 0 without a backup.
    Raises SettingsError if there is no run, if the checkpoint is missing or damaged, if a core uses the directory, or
    if the directory belongs to a shard without the registrar. Raises LedgerError for a damaged ledger.
    """
    with stopped_ledger(directory, disk) as db:
        meta = _meta(db, directory)
        if "shard" in meta:
            raise SettingsError(
                f"{directory} holds shard {meta['shard'][0]} of a run: restore the checkpoint in the registrar's "
                "directory; this shard rolls back when it starts"
            )
        return _Rollback(db, directory, meta, disk, clock, backup_at).of_run(checkpoint)


def follow(directory: Path, generation: int, snapshot: int, disk: Disk = DISK, clock: Clock = SYSTEM) -> RolledBack:
    """Rolls back the directory of a shard after its run was restored to a checkpoint.

    generation: the run's new generation. snapshot: the shard's snapshot in the checkpoint. Changes nothing if the shard
    is already at this generation. Raises the same errors as `roll_back`.
    """
    with stopped_ledger(directory, disk) as db:
        return _Rollback(db, directory, _meta(db, directory), disk, clock).of_shard(generation, snapshot)


def _meta(db: sqlite3.Connection, directory: Path) -> dict[str, Any]:
    """Returns the run's values in the ledger. Raises SettingsError if the run has no parameters yet."""
    meta = run_ledger.get_meta(db)
    if "fingerprint" not in meta:
        raise SettingsError(
            f"the run in {directory} has no parameters and thus no checkpoint yet: start a learner first"
        )
    return meta


class _Rollback:
    """The rollback of one directory. meta: the run's values in the ledger. backup_at: see `roll_back`."""

    def __init__(
        self,
        db: sqlite3.Connection,
        directory: Path,
        meta: dict[str, Any],
        disk: Disk,
        clock: Clock,
        backup_at: float = 0.0,
    ) -> None:
        self._db = db
        self._directory = directory
        self._meta = meta
        self._disk = disk
        self._clock = clock
        self._backup_at = backup_at
        self._line = lineage.line_of(meta)

    def of_run(self, checkpoint: int) -> RolledBack:
        """Rolls back a registrar's directory. Raises SettingsError if the checkpoint is missing or damaged."""
        if "owned" not in self._meta:
            return self._alone(checkpoint)
        known = manifests.manifests_of(self._meta)
        found = next((each for each in known if each.id == checkpoint), None)
        if found is None:
            raise SettingsError(f"there is no checkpoint {checkpoint} in {self._directory}: {_listed(known)}")
        row = self._intact(found.snapshots[found.own])
        merges, others = sum(found.versions.values()), len(found.snapshots) - 1
        before = manifests.restored_of(self._meta)
        if before is not None and before.checkpoint == checkpoint and self._untouched():
            return RolledBack(row, merges, self._line.generation, began=False, shards=others)
        generation = self._next()
        manifest = RestoredManifest(generation, checkpoint, found.snapshots)
        self._begin(generation, replace(row, datasets=found.datasets), manifest)
        return RolledBack(row, merges, generation, began=True, shards=others)

    def _alone(self, checkpoint: int) -> RolledBack:
        """Rolls back a run that has one shard. The shard's snapshots are the run's checkpoints."""
        row, line = self._intact(checkpoint), self._line
        merges = sum(row.versions.values())
        if line.beginnings and line.beginnings[0].checkpoint == checkpoint and self._untouched():
            return RolledBack(row, merges, line.generation, began=False)
        generation = self._next()
        self._begin(generation, row)
        return RolledBack(row, merges, generation, began=True)

    def _next(self) -> int:
        """Returns a number for a new generation.

        A backup does not contain the generations that began after it. If one of their numbers were reused, learners and
        shards of that generation would not notice the restore. The number therefore also grows with the backup's age.
        """
        age_s = max(0.0, self._clock.wall() - self._backup_at) if self._backup_at else 0.0
        return self._line.generation + 1 + int(age_s / PER_GENERATION_S)

    def of_shard(self, generation: int, snapshot: int) -> RolledBack:
        """Rolls back a shard's directory. Raises SettingsError if the snapshot is missing or damaged."""
        row = self._intact(snapshot)
        if began := self._line.generation != generation:
            self._begin(generation, row)
        return RolledBack(row, sum(row.versions.values()), generation, began=began)

    def _intact(self, snapshot: int) -> SnapshotRow:
        """Returns a snapshot's row after reading the snapshot's file.

        Raises SettingsError if the file is missing or damaged.
        """
        rows = shard_ledger.snapshots(self._db)
        row = next((each for each in rows if each.id == snapshot), None)
        part = "owned" in self._meta  # then the snapshot is only this shard's part of a checkpoint
        fix = "restore the directory from a backup, or the run to another checkpoint"
        if row is None:
            if part:
                raise SettingsError(f"{self._directory} lacks snapshot {snapshot} of this shard: {fix}")
            raise SettingsError(f"there is no checkpoint {snapshot} in {self._directory}: {_listed(rows)}")
        try:
            fragments = Origin.of(self._meta).fragments()
            load_snapshot(snapshot_path(self._directory, row.id), fragments, row, self._disk)
        except SnapshotError as error:
            if part:
                raise SettingsError(f"snapshot {snapshot} of this shard is damaged ({error}): {fix}") from error
            others = [each for each in rows if each.id != snapshot]
            raise SettingsError(f"checkpoint {snapshot} is damaged ({error}): {_listed(others)}") from error
        crash_points.point("rollback.checked")
        return row

    def _untouched(self) -> bool:
        """Returns whether the ledger contains no contribution of the current generation."""
        return next(shard_ledger.contributions(self._db, self._line.generation, "LIMIT 1"), None) is None

    def _begin(self, generation: int, row: SnapshotRow, manifest: RestoredManifest | None = None) -> None:
        """Begins a generation at a snapshot. manifest: the checkpoint of the run that names this snapshot, if any."""
        db, meta = self._db, self._meta
        now = self._clock.wall()
        begun = Beginning(generation, row.generation, row.id, row.versions, meta["epoch"], now, self._backup_at)
        with database.transaction(db):
            _refuse_pending(db, self._line.generation, begun)
            meta |= {"generation": generation, lineage.META: [*meta.get(lineage.META, []), begun.as_data()]}
            if run_ledger.VIEW in meta:  # a shard's schedules follow the checkpoint even before it attaches
                # The epoch is 0, since the registrar may have been restored from a backup with a lower epoch.
                view = meta[run_ledger.VIEW] | {"run_tokens": sum(row.tokens.values()), "epoch": 0, "sequence": 0}
                run_ledger.put_meta(db, run_ledger.VIEW, view)
            for key in ("generation", lineage.META):
                run_ledger.put_meta(db, key, meta[key])
            if manifest is not None:
                manifests.put_restored(db, manifest)
            data_ledger.roll_back(db, row.datasets)
            _count_again(db, lineage.line_of(meta), row, Origin.of(meta))
            crash_points.point("rollback.rows written")
        crash_points.point("rollback.committed")


def _listed(rows: Sequence[SnapshotRow | Manifest]) -> str:
    """Returns a list of the checkpoints as text for error messages."""
    if not rows:
        return "the run has no checkpoint that can be restored"
    told = [f"{row.id} ({sum(row.versions.values())} merges, generation {row.generation})" for row in rows]
    return f"use one of {', '.join(told)}"


def _refuse_pending(db: sqlite3.Connection, generation: int, begun: Beginning) -> None:
    """Refuses the old generation's pending contributions, so that their receipts are final."""
    why = f"the run was restored to checkpoint {begun.checkpoint} (generation {begun.generation}) before the merge"
    waiting = [row.key for row, _ in shard_ledger.contributions(db, generation, "AND fate='pending'")]
    shard_ledger.put_fates(db, generation, [FateRow(key, Fate.REFUSED, reason=why, dropped=True) for key in waiting])


def _count_again(db: sqlite3.Connection, line: Line, row: SnapshotRow, origin: Origin) -> None:
    """Writes all learners' sums and accounts. The sums include only tokens merged in the new generation's history."""
    sums: dict[Sender, TotalsRow] = {}
    merged: dict[Sender, int] = defaultdict(int)
    through = 0
    for made_in in range(1, line.generation):
        for number, sent, fate in shard_ledger.came_after(db, made_in, 0):
            key = sent.key
            sender = (key.learner, key.incarnation, key.fragment)
            sums[sender] = sums.get(sender, TotalsRow(*sender)).plus(number, sent, fate)
            through = max(through, number)
            if fate.fate is Fate.MERGED:
                merged[sender] += sent.tokens
    counted: dict[Sender, int] = defaultdict(int)
    for fragment in origin.fragments():
        for _, sent, _ in lineage.merged(db, line, fragment.index, 0):
            counted[sent.key.learner, sent.key.incarnation, fragment.index] += sent.tokens
    for sender, totals_row in sums.items():
        # seq is 0 since the learner has not sent any contribution in the new generation.
        shard_ledger.put_totals(
            db, line.generation, replace(totals_row, through=through, tokens=counted[sender], seq=0, units={})
        )
    undone = {sender: tokens - counted[sender] for sender, tokens in merged.items()}
    from_backup = bool(line.beginnings[0].backup_at) and origin.owned is None
    for learner in run_ledger.learners(db):
        kept = _mean(learner, counted, origin.layout) if from_backup else None
        run_ledger.put_learner(db, _restored(learner, row, _mean(learner, undone, origin.layout), kept))


def _mean(learner: LearnerRow, tokens: Mapping[Sender, int], layout: Layout) -> float:
    """Returns the tokens of a learner's newest incarnation, as a mean over fragments weighted by their length."""
    parts = (
        tokens.get((learner.name, learner.incarnation, fragment.index), 0) * fragment.length / layout.parameters
        for fragment in layout.fragments
    )
    return sum(parts)


def _restored(learner: LearnerRow, row: SnapshotRow, undone: float, kept: float | None) -> LearnerRow:
    """Returns a learner's row after resetting its account to the checkpoint.

    undone, kept: see `TimeAccount.restored`.
    """
    account: TimeAccount = TimeAccount.from_data(learner.account)
    account.restored(row.tokens.get(learner.name, 0), undone, kept)
    account.by_shard.clear()  # these sums include work that the restore discarded; each shard computes its own again
    data: dict[str, Any] = account.as_data()
    return replace(learner, account=data)
