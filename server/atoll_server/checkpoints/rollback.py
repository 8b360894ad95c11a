"""Rolls a run back to an older checkpoint, from which a new generation begins.

One ledger transaction makes the whole change, so a crash leaves either the old generation or the new one. Contributions
merged after the checkpoint stay in the ledger under the old generation, for receipts, but are no longer part of the
run.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll_wire.contract import Fate
from atoll_wire.errors import SettingsError
from atoll_wire.layout.layout import Layout
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.checkpoints.restore import LEDGER, stored_layout
from atoll_server.checkpoints.snapshot import SnapshotError, load_snapshot, snapshot_path
from atoll_server.learners.goodput import TimeAccount
from atoll_server.storage import crash_points, database, lineage, run_ledger, shard_ledger
from atoll_server.storage.disk import DISK, Disk
from atoll_server.storage.lineage import Beginning, Line
from atoll_server.storage.rows import FateRow, LearnerRow, SnapshotRow, TotalsRow

Sender = tuple[str, int, int]  # learner, incarnation, fragment


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The result of a rollback. row: the checkpoint's row in the ledger.

    generation: the generation that continues from the checkpoint. began: whether the rollback began this generation.
    """

    row: SnapshotRow
    generation: int
    began: bool


def roll_back(directory: Path, checkpoint: int, disk: Disk = DISK, clock: Clock = SYSTEM) -> RolledBack:
    """Rolls back the run in a directory to a checkpoint. Changes nothing if the run is already at this checkpoint.

    Raises SettingsError if there is no run, a core uses the directory, or the checkpoint is missing or damaged.
    Raises LedgerError if the ledger is damaged.
    """
    if not disk.exists(directory / LEDGER):
        raise SettingsError(f"{directory} holds no run: give the --dir of a core")
    try:
        unlock = disk.lock(directory / "lock")
    except BlockingIOError as error:
        raise SettingsError(f"a core uses {directory}: stop the core, restore, and start the core again") from error
    except OSError as error:
        raise SettingsError(
            f"{directory} cannot be used ({error.strerror}): give a directory that you may write to"
        ) from error
    try:
        db = database.open_ledger(directory / LEDGER, disk)
        try:
            return _roll_back(db, directory, checkpoint, disk, clock)
        finally:
            db.close()
    finally:
        unlock()


def _roll_back(db: sqlite3.Connection, directory: Path, checkpoint: int, disk: Disk, clock: Clock) -> RolledBack:
    meta = run_ledger.get_meta(db)
    if "fingerprint" not in meta:
        raise SettingsError(
            f"the run in {directory} has no parameters and thus no checkpoint yet: start a learner first"
        )
    rows = shard_ledger.snapshots(db)
    row = next((each for each in rows if each.id == checkpoint), None)
    layout, line = stored_layout(meta), lineage.line_of(meta)
    if row is None:
        raise SettingsError(f"there is no checkpoint {checkpoint} in {directory}: {_listed(rows)}")
    try:
        load_snapshot(snapshot_path(directory, row.id), layout.fragments, row, disk)
    except SnapshotError as error:
        others = [each for each in rows if each.id != checkpoint]
        raise SettingsError(f"checkpoint {checkpoint} is damaged ({error}): {_listed(others)}") from error
    crash_points.point("rollback.checked")
    if line.beginnings and line.beginnings[0].checkpoint == checkpoint and _untouched(db, line.generation):
        return RolledBack(row, line.generation, began=False)
    generation = line.generation + 1
    begun = Beginning(generation, row.generation, row.id, row.versions, meta["epoch"], clock.wall())
    with database.transaction(db):
        _refuse_pending(db, line.generation, begun)
        meta |= {"generation": generation, lineage.META: [*meta.get(lineage.META, []), begun.as_data()]}
        for key in ("generation", lineage.META):
            run_ledger.put_meta(db, key, meta[key])
        _count_again(db, lineage.line_of(meta), row, layout)
        crash_points.point("rollback.rows written")
    crash_points.point("rollback.committed")
    return RolledBack(row, generation, began=True)


def _listed(rows: list[SnapshotRow]) -> str:
    """Returns a list of the checkpoints, as text for error messages."""
    if not rows:
        return "the run has no checkpoint that can be restored"
    told = [f"{row.id} ({sum(row.versions.values())} merges, generation {row.generation})" for row in rows]
    return f"use one of {', '.join(told)}"


def _untouched(db: sqlite3.Connection, generation: int) -> bool:
    """Returns whether the ledger contains no contribution of this generation."""
    return next(shard_ledger.contributions(db, generation, "LIMIT 1"), None) is None


def _refuse_pending(db: sqlite3.Connection, generation: int, begun: Beginning) -> None:
    """Refuses the old generation's pending contributions, so that their receipts are final."""
    why = f"the run was restored to checkpoint {begun.checkpoint} (generation {begun.generation}) before the merge"
    waiting = [row.key for row, _ in shard_ledger.contributions(db, generation, "AND fate='pending'")]
    shard_ledger.put_fates(db, generation, [FateRow(key, Fate.REFUSED, reason=why, dropped=True) for key in waiting])


def _count_again(db: sqlite3.Connection, line: Line, row: SnapshotRow, layout: Layout) -> None:
    """Writes all learners' sums and accounts. The sums count only tokens merged in the new generation's history."""
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
    for fragment in layout.fragments:
        for _, sent, _ in lineage.merged(db, line, fragment.index, 0):
            counted[sent.key.learner, sent.key.incarnation, fragment.index] += sent.tokens
    for sender, totals_row in sums.items():
        # seq is 0 since the learner has not sent any contribution in the new generation.
        shard_ledger.put_totals(
            db, line.generation, replace(totals_row, through=through, tokens=counted[sender], seq=0)
        )
    undone = {sender: tokens - counted[sender] for sender, tokens in merged.items()}
    for learner in run_ledger.learners(db):
        run_ledger.put_learner(db, _restored(learner, row, undone, layout))


def _restored(learner: LearnerRow, row: SnapshotRow, undone: dict[Sender, int], layout: Layout) -> LearnerRow:
    """Returns a learner's row with its account reset to the checkpoint."""
    account: TimeAccount = TimeAccount.from_data(learner.account)
    parts = (
        undone.get((learner.name, learner.incarnation, fragment.index), 0) * fragment.length / layout.parameters
        for fragment in layout.fragments
    )
    account.restored(row.tokens.get(learner.name, 0), sum(parts))
    account.by_shard.clear()  # these sums include the undone work; each shard computes its own again
    data: dict[str, Any] = account.as_data()
    return replace(learner, account=data)
