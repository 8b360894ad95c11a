"""Takes snapshots and deletes payloads that two snapshots cover."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Collection, Iterable
from functools import partial

import structlog

from atoll_server.checkpoints.restore import Restored
from atoll_server.checkpoints.snapshot import SnapshotWriter, snapshot_path
from atoll_server.ledger import lineage, manifests, shard_ledger, totals
from atoll_server.ledger.database import BEFORE_RESTORING, LedgerError
from atoll_server.ledger.lineage import Line
from atoll_server.ledger.manifests import KeptSnapshots
from atoll_server.ledger.rows import SnapshotRow
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.shard.fragment import Fragment
from atoll_server.shard_context.context import ShardContext
from atoll_server.shard_context.work import Work
from atoll_server.storage import crash_points
from atoll_server.storage.spool import Spool
from atoll_server.telemetry import entries

log = structlog.get_logger()

LONGEST_REPLAY_S = 0.5  # a snapshot is due when a replay of the merges after the newest one would take this long
FAILED_S = 1.0  # a failed snapshot counts as if it had taken at least this long
REST = 10.0  # shortest time between early snapshots, as a multiple of the last one's duration


class Snapshotter:
    """One shard's snapshots. rows: snapshots on the disk, oldest first.

    undone: snapshots of work that `checkpoint restore` discarded; they are kept until this generation has two
    snapshots. kept: snapshots that must not be deleted because a checkpoint of several shards names them.
    """

    def __init__(
        self,
        context: ShardContext,
        fragments: dict[int, Fragment],
        spool: Spool,
        work: Work,
        restored: Restored,
        *,
        damaged: bool,
    ) -> None:
        """spool: the payloads that snapshots cover. damaged: whether a damaged snapshot was found and dropped."""
        self._context = context
        self._fragments = fragments
        self._spool = spool
        self._work = work
        self._line = restored.line
        self.rows = restored.snapshots
        self.undone = restored.undone
        self.kept = restored.kept
        self._part = len(fragments) < len(restored.layout.fragments)  # whether the run has other shards
        self._left_behind = undoable(self.rows, self._line)
        self._let_go_to = covered(self.rows, fragments)
        self._taking = asyncio.Lock()
        self._tasks: set[asyncio.Task[SnapshotRow]] = set()
        self._taken_at = context.clock.monotonic()
        self._took_s = 0.0
        self._unsaved_s = restored.replay_s  # duration of the merges after the newest snapshot, which a start replays
        # Whether a dropped snapshot needs a replacement: the payloads that it covered may be deleted.
        self._one_is_missing = damaged

    def all(self) -> list[SnapshotRow]:
        """Returns all snapshots that an operator can restore, oldest first."""
        return sorted([*self.rows, *self.undone], key=lambda row: row.id)

    async def keep(self, snapshots: Collection[int], through: int) -> None:
        """Durably stores which snapshots must be kept: these, and those marked earlier with an ID above `through`."""
        kept = self.kept.told(frozenset(snapshots), through)
        if kept != self.kept:
            self.kept = kept
            await self._context.writer.commit(partial(manifests.put_kept, kept=kept))
            crash_points.point("kept.committed")

    async def keep_only(self, named: Collection[int]) -> None:
        """Durably stores that only these snapshots must be kept. Earlier attempts at a checkpoint have ended."""
        await self.keep(named, max(self.kept.snapshots, default=0))

    def merged(self, took_s: float) -> None:
        """Records a new merge, which no snapshot covers yet. took_s: duration of the merge in seconds."""
        self._unsaved_s += took_s

    def due(self) -> bool:
        """Returns whether the core must take a snapshot now.

        A snapshot is due if a damaged one was dropped. After new merges, a snapshot is also due if the interval has
        passed, or if a replay of these merges would take too long.
        """
        since_s = self._context.clock.monotonic() - self._taken_at
        late = since_s >= self._context.settings.snapshot_every_s
        rested = since_s >= REST * self._took_s
        much = rested and self._unsaved_s >= LONGEST_REPLAY_S
        replace_missing = rested and self._one_is_missing
        return not self._taking.locked() and (replace_missing or ((late or much) and self.stale()))

    def stale(self) -> bool:
        """Returns whether there are merges that the newest snapshot does not cover."""
        versions = {index: fragment.version for index, fragment in self._fragments.items()}
        return not self.rows or self.rows[-1].versions != versions

    async def take(self, *, keep: bool = False) -> SnapshotRow:
        """Takes a snapshot, then deletes files that are no longer needed. Continues even if the caller is cancelled.

        keep: whether to keep the snapshot for a checkpoint of several shards (see `keep`).
        Raises OSError if the snapshot cannot be written.
        """
        task = asyncio.create_task(self._take(keep=keep))
        self._tasks.add(task)
        task.add_done_callback(self._taken)
        return await asyncio.shield(task)

    async def settled(self) -> None:
        """Waits for running snapshots, including those whose caller was cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _taken(self, task: asyncio.Task[SnapshotRow]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # recorded here, since the caller may have been cancelled
            # The ledger and the spool still contain all work, so the only effect is a longer start.
            self._context.record(entries.SnapshotFailed(str(error)))

    async def _take(self, *, keep: bool = False) -> SnapshotRow:
        context = self._context
        async with self._taking:
            self._taken_at, unsaved_s = context.clock.monotonic(), self._unsaved_s
            number = 1 + max((row.id for row in (*self.rows, *self.undone)), default=0)
            tokens, datasets = context.registry.counted_tokens(), context.datasets()
            places = [fragment.place for fragment in self._fragments.values()]
            writer = SnapshotWriter(snapshot_path(context.settings.directory, number), places, context.disk)
            try:
                await self._write(writer)
            except OSError:
                self._took_s = max(FAILED_S, context.clock.monotonic() - self._taken_at)
                await asyncio.to_thread(writer.give_up)  # frees its disk space
                raise
            row = SnapshotRow(
                number,
                context.generation,
                writer.versions,
                writer.checksums,
                tokens,
                context.clock.wall(),
                writer.size_bytes,
                datasets,
            )
            if keep:
                self.kept = self.kept.plus(number)
            await context.writer.commit(partial(_add_snapshot, row=row, kept=self.kept if keep else None))
            crash_points.point("snapshot.committed")
            self.rows.append(row)
            self._one_is_missing = False
            self._took_s = context.clock.monotonic() - self._taken_at
            self._unsaved_s -= unsaved_s
            taken = entries.SnapshotTaken(row.id, sum(row.versions.values()), row.size_bytes, part=self._part)
            context.record(taken)
            await self._drop_old()
            while await context.writer.commit(self._add_up):
                pass
        return row

    def _add_up(self, db: sqlite3.Connection) -> bool:
        """Adds contributions to the ledger's sums. Returns whether more may follow. Runs in the ledger's thread."""
        try:
            return totals.add_up(db, self._context.generation)
        except LedgerError as error:  # raised before the first write
            log.error(
                "the ledger is damaged: training continues, but a restart may fail",
                error=f"{error}{BEFORE_RESTORING}",
            )
            return False

    async def _write(self, writer: SnapshotWriter) -> None:
        await asyncio.to_thread(writer.begin)
        for index, fragment in self._fragments.items():
            async with fragment.lock:
                if self._work.failed:
                    raise OSError("the core has failed: no more snapshots are written")
                await asyncio.to_thread(writer.add, index, fragment.state)
        await asyncio.to_thread(writer.finish)

    async def _drop_old(self) -> None:
        context = self._context
        held = undoable(self.rows, self._line)
        for rows, count in ((self.rows, context.run.keep_snapshots), (self.undone, len(self.undone) if held else 0)):
            for row in rows[: max(0, len(rows) - count)]:
                if row.id not in self.kept.snapshots:
                    rows.remove(row)
                    await self._drop(row)
        older, self._let_go_to = self._let_go_to, covered(self.rows, self._let_go_to)
        bounds = {fragment: (after, self._let_go_to[fragment]) for fragment, after in older.items()}
        await asyncio.to_thread(self._let_go, await context.writer.commit(partial(self._covered, bounds=bounds)))
        if self._left_behind and not held:
            self._left_behind = False
            await asyncio.to_thread(self._let_go_of_undone)

    async def _drop(self, old: SnapshotRow) -> None:
        context = self._context
        await context.writer.commit(partial(shard_ledger.drop_snapshot, snapshot_id=old.id))
        crash_points.point("snapshot.old forgotten")
        await asyncio.to_thread(context.disk.remove, snapshot_path(context.settings.directory, old.id))
        crash_points.point("snapshot.old removed")

    def _covered(
        self, db: sqlite3.Connection, bounds: dict[int, tuple[int, int]]
    ) -> list[tuple[int, ContributionKey, int]]:
        """Returns (generation, key, bytes) for each payload that two snapshots cover now but did not cover before.

        bounds: pair (after, to) for each fragment; the newly covered versions are above `after` and at most `to`.
        """
        return [
            (generation, row.key, row.size_bytes)
            for fragment, (after, to) in bounds.items()
            for generation, row, _ in lineage.merged(db, self._line, fragment, after, to)
        ]

    def _let_go(self, covered: list[tuple[int, ContributionKey, int]]) -> None:
        """Deletes covered payloads. A recorded run keeps them, but they no longer count against the spool's limit."""
        for generation, key, size_bytes in covered:
            if self._context.run.record:
                self._spool.release(size_bytes)
            else:
                self._spool.delete(generation, key, size_bytes)

    def _let_go_of_undone(self) -> None:
        """Deletes the payloads of older generations, unless the run is recorded."""
        if not self._context.run.record:
            self._spool.delete_older(self._context.generation)


def _add_snapshot(db: sqlite3.Connection, row: SnapshotRow, kept: KeptSnapshots | None) -> None:
    shard_ledger.add_snapshot(db, row)
    if kept is not None:
        manifests.put_kept(db, kept)


def undoable(rows: list[SnapshotRow], line: Line) -> bool:
    """Returns whether a `checkpoint restore` can still be undone, because this generation has fewer than two snapshots.

    Until then, the core keeps the work that the restore discarded.
    """
    return bool(line.beginnings) and sum(row.generation == line.generation for row in rows) < 2


def covered(rows: list[SnapshotRow], fragments: Iterable[int]) -> dict[int, int]:
    """Returns, for each fragment, the version up to which two snapshots cover the payloads.

    The version is 0 if there are fewer than two snapshots.
    """
    return rows[-2].versions if len(rows) >= 2 else dict.fromkeys(fragments, 0)
