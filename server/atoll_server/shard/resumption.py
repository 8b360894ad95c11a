"""From the ledger back into an engine's memory: rounds, what waits, receipts, counters, and the room that is taken."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog
from atoll_wire.spans import Codec

from atoll_server.checkpoints.restore import Restored
from atoll_server.learners.registry import Entry
from atoll_server.rounds.events import Key
from atoll_server.rounds.fragment_rounds import Pending
from atoll_server.rounds.liveness import Member
from atoll_server.shard.contributions import receipt_of
from atoll_server.shard.engine import Engine
from atoll_server.shard.publications import Publication
from atoll_server.shard.snapshotter import covered
from atoll_server.storage import ledger
from atoll_server.storage.database import LedgerError
from atoll_server.storage.rows import ContributionRow, FateRow, TallyRow

log = structlog.get_logger()


def take_up(engine: Engine, db: sqlite3.Connection, restored: Restored, wall: float) -> None:
    """Brings an engine to where the ledger left the run; before anybody connects. wall: seconds of the run's clock."""
    entries = engine.roster.entries.values()
    for entry in entries:
        entry.account.forget_contributions()
    last = ledger.last_merges(db, engine.generation, len(engine.layout.fragments))
    cycles = [cycle for cycle, _ in last]
    lines = list(ledger.tallies(db, engine.generation))
    for tally in lines:
        engine.contributions.add(tally)
        cycles[tally.fragment] = max(cycles[tally.fragment], tally.cycle)
    _note_newest(engine, db, lines)
    waiting: list[tuple[Key, Pending]] = []
    for _, row, fate in ledger.came_after(db, engine.generation, max((tally.through for tally in lines), default=0)):
        cycles[row.key.fragment] = max(cycles[row.key.fragment], row.cycle)
        pending = _contribution(engine, row, fate)
        if pending is not None:
            waiting.append((row.key, pending))
    room = _room(engine, db, covered(restored.snapshots, len(engine.layout.fragments)))
    deleted = engine.spool.sweep(room)  # what is not in it was never acknowledged, or is of no more use
    engine.spool.prepare(engine.generation, len(engine.layout.fragments))
    engine.spool.used_bytes = sum(size for path, size in room.items() if engine.disk.exists(path))
    for fragment in range(len(engine.layout.fragments)):
        for learner, norm, steps in ledger.latest_norms(db, engine.generation, fragment, engine.guard.window):
            engine.guard.note(fragment, learner, norm, steps)
    for fragment, made_again in restored.updates.items():
        for update in made_again:
            values = (fragment, update.version)
            told = ledger.contributions(db, engine.generation, "AND fragment=? AND version=?", values)
            receipts = tuple(receipt_of(fate) for _, fate in told)
            engine.cache.add(fragment, replace(Publication.of(update), receipts=receipts))
    now = time.monotonic()
    synced_at = [now - max(0.0, wall - (at or 0.0)) for _, at in last]
    members = {entry.name: _member(entry, now) for entry in entries}
    engine.published_at = [None if at is None else now - max(0.0, wall - at) for _, at in last]
    kept = engine.run.max_staleness + 1.0
    ages = [ledger.ages(db, engine.generation, index, kept) for index in range(len(engine.layout.fragments))]
    engine.syncer.restore(engine.versions(), cycles, waiting, members, synced_at, ages)
    log.info("state taken up", merges=sum(engine.versions()), pending=len(waiting), files_not_needed=deleted)


def _note_newest(engine: Engine, db: sqlite3.Connection, lines: list[TallyRow]) -> None:
    """What each learner sent last to each fragment, so that it is not taken twice."""
    newest = {(tally.learner, tally.fragment): tally for tally in sorted(lines, key=lambda tally: tally.incarnation)}
    for tally in newest.values():
        key = Key(tally.learner, tally.incarnation, tally.fragment, tally.seq)
        found = ledger.contribution(db, engine.generation, key)
        if found is None:
            raise LedgerError(f"the ledger lacks contribution {key}: restore a backup")
        engine.uploads.note(found[0].digest, receipt_of(found[1]))


def _room(engine: Engine, db: sqlite3.Connection, covered: tuple[int, ...]) -> dict[Path, int]:
    """Every payload that stays, with the room that it takes from others."""
    if engine.run.record:
        rows = list(ledger.contributions(db, engine.generation, "AND fate<>'refused'"))
    else:
        rows = list(ledger.contributions(db, engine.generation, "AND fate='pending'"))
        for values in enumerate(covered):
            rows += ledger.contributions(
                db, engine.generation, "AND fragment=? AND fate='merged' AND version>?", values
            )
    return {
        engine.spool.path(engine.generation, row.key):
        0 if fate.fate == "merged" and fate.version <= covered[row.key.fragment] else row.size_bytes
        for row, fate in rows
    }  # fmt: skip


def _contribution(engine: Engine, row: ContributionRow, fate: FateRow) -> Pending | None:
    """Counts one; opens its payload if it waits for its merge."""
    engine.contributions.accept(row)
    engine.uploads.note(row.digest, receipt_of(fate))
    if fate.fate != "pending":
        engine.contributions.end(row, fate)
        return None
    norms_sq = np.array(row.norms_sq, np.float64)
    engine.contributions.hold(row, engine.spool.open(engine.generation, row.key, Codec(row.codec), norms_sq, row.scale))
    return Pending(row.cycle, row.base_version, row.tokens, row.steps)


def _member(entry: Entry, now: float) -> Member:
    step_s = entry.account.step_time_s
    return Member(
        entry.incarnation, now, now, gone=entry.account.left_at is not None, step_time_s=step_s,
        remembered=step_s is not None,
    )  # fmt: skip
