"""Restores a shard's memory from the ledger: rounds, pending contributions, receipts, counters and spool space."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
from atoll_wire.contract import Fate
from atoll_wire.layout.frame_spans import Codec

from atoll_server.checkpoints.restore import Restored
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.ledger import lineage, shard_ledger
from atoll_server.ledger.database import LedgerError
from atoll_server.ledger.rows import ContributionRow, FateRow, TotalsRow
from atoll_server.rounds.liveness import LearnerLiveness
from atoll_server.rounds.round_state import PendingContribution
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.shard.contributions import receipt_of
from atoll_server.shard.publications import Publication
from atoll_server.shard.shard import Shard
from atoll_server.shard.snapshotter import covered, undoable
from atoll_server.telemetry import entries


def restore_shard(shard: Shard, db: sqlite3.Connection, restored: Restored) -> None:
    """Restores a shard to the state in the ledger, before the core accepts calls.

    Raises LedgerError or SpoolError if the stored state is damaged.
    """
    context = shard.context
    generation = context.generation
    shard.contributions.forget()
    last = {index: lineage.last_merge(db, restored.line, index) for index in shard.fragments}
    cycles = {index: cycle for index, (cycle, _) in last.items()}
    lines = list(shard_ledger.totals(db, generation))
    for totals_row in lines:
        shard.contributions.add(totals_row)
        cycles[totals_row.fragment] = max(cycles[totals_row.fragment], totals_row.cycle)
    _note_newest(shard, db, lines)
    waiting: dict[int, list[tuple[ContributionKey, PendingContribution]]] = {index: [] for index in shard.fragments}
    for _, row, fate in shard_ledger.came_after(
        db, generation, max((totals_row.through for totals_row in lines), default=0)
    ):
        cycles[row.key.fragment] = max(cycles[row.key.fragment], row.cycle)
        pending = _contribution(shard, row, fate)
        if pending is not None:
            waiting[row.key.fragment].append((row.key, pending))
    room = _room(shard, db, restored)
    deleted = shard.spool.sweep(room)  # deleted payloads were never acknowledged, or are no longer needed
    shard.spool.prepare(generation, shard.fragments)
    shard.spool.used_bytes = sum(size for path, size in room.items() if context.disk.exists(path))
    for index, updates in restored.updates.items():
        for update in updates:
            told = shard_ledger.contributions(db, generation, "AND fragment=? AND version=?", (index, update.version))
            receipts = tuple(receipt_of(fate) for _, fate in told)
            shard.cache.add(index, replace(Publication.of(update, compressed=False), receipts=receipts))
    now, wall = context.clock.monotonic(), context.clock.wall()
    for index, fragment in shard.fragments.items():
        for learner, norm, steps in lineage.latest_norms(db, restored.line, index, fragment.norms.window):
            fragment.norms.note(learner, norm, steps)
        _, at = last[index]
        fragment.published_at = None if at is None else now - max(0.0, wall - at)
        synced_at = now - max(0.0, wall - (at or 0.0))
        ages = lineage.ages(db, restored.line, index, context.run.max_staleness + 1.0)
        fragment.rounds.resume(cycles[index], synced_at, ages, waiting[index])
    shard.syncer.restore({entry.name: _observed(entry, now) for entry in context.registry.entries.values()})
    pending_count = sum(map(len, waiting.values()))
    merges = sum(shard.versions().values())
    counts = shard.contributions
    taken_up = entries.TakenUp(merges, pending_count, deleted, counts.accepted, counts.merged, counts.refused)
    context.journal.record(taken_up, now)


def _note_newest(shard: Shard, db: sqlite3.Connection, lines: list[TotalsRow]) -> None:
    """Records each learner's newest contribution to each fragment, so that it is not accepted twice."""
    generation = shard.context.generation
    newest = {
        (totals_row.learner, totals_row.fragment): totals_row
        for totals_row in sorted(lines, key=lambda totals_row: totals_row.incarnation)
    }
    for totals_row in newest.values():
        if not totals_row.seq:
            continue  # the learner has sent no contribution in this generation
        key = ContributionKey(totals_row.learner, totals_row.incarnation, totals_row.fragment, totals_row.seq)
        found = shard_ledger.contribution(db, generation, key)
        if found is None:
            raise LedgerError(f"the ledger lacks contribution {key}: restore a backup")
        shard.uploads.note(found[0].digest, receipt_of(found[1]))


def _room(shard: Shard, db: sqlite3.Connection, restored: Restored) -> dict[Path, int]:
    """Returns the paths of payloads to keep, each with the bytes that count against the spool's limit."""
    spool, generation = shard.spool, restored.line.generation
    room: dict[Path, int] = {}
    if shard.context.run.record:
        for made_in in range(1, generation + 1):
            for row, _ in shard_ledger.contributions(db, made_in, "AND fate='merged'"):
                room[spool.path(made_in, row.key)] = 0
    for row, _ in shard_ledger.contributions(db, generation, "AND fate='pending'"):
        room[spool.path(generation, row.key)] = row.size_bytes
    for fragment, after in covered(restored.snapshots, shard.fragments).items():
        for made_in, row, _ in lineage.merged(db, restored.line, fragment, after):
            room[spool.path(made_in, row.key)] = row.size_bytes
    if undoable(restored.snapshots, restored.line):  # keep payloads of discarded work while the restore can be undone
        room = dict.fromkeys(spool.older(generation), 0) | room
    return room


def _contribution(shard: Shard, row: ContributionRow, fate: FateRow) -> PendingContribution | None:
    """Counts a contribution. If the contribution is pending, opens its payload and returns it for the syncer."""
    shard.contributions.accept(row)
    shard.uploads.note(row.digest, receipt_of(fate))
    if fate.fate is not Fate.PENDING:
        shard.contributions.end(row, fate)
        return None
    norms_sq = np.array(row.norms_sq, np.float64)
    stored = shard.spool.open(shard.context.generation, row.key, Codec(row.codec), norms_sq, row.scale)
    shard.contributions.hold(row, stored)
    return PendingContribution(row.cycle, row.base_version, row.tokens, row.steps)


def _observed(entry: RegistryEntry, now: float) -> LearnerLiveness:
    step_s = entry.account.step_time_s
    return LearnerLiveness(
        entry.incarnation,
        now,
        now,
        gone=entry.account.left_at is not None,
        step_time_s=step_s,
        remembered=step_s is not None,
    )
