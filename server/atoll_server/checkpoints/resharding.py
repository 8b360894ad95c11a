"""Divides a stopped run's fragments among a different number of shards.

The new directories are written to a temporary folder, compared with the old ones, and renamed at the end. The old
directories stay complete. A crash leaves either the old run or a move that a second call completes. It never leaves two
runs that can both be started.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from atoll_wire.contract import Fate
from atoll_wire.errors import UsageError
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import Layout, LayoutError
from atoll_wire.layout.sharding import divide
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.checkpoints.restore import INITIAL, LEDGER, Origin, check_initial, restore, stored_layout
from atoll_server.checkpoints.shard_part import part_chunks
from atoll_server.checkpoints.snapshot import SnapshotWriter, load_snapshot, snapshot_path
from atoll_server.checkpoints.stopped_run import (
    StoppedShard,
    check_room,
    learners_of,
    new_folder,
    open_shards,
    registrar_of,
)
from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_server.learners.goodput import TimeAccount
from atoll_server.ledger import data_ledger, database, ledger_division, lineage, manifests, run_ledger, shard_ledger
from atoll_server.ledger.manifests import KeptSnapshots, Manifest, RestoredManifest
from atoll_server.ledger.rows import ContributionRow, LearnerRow, SnapshotRow
from atoll_server.storage import crash_points
from atoll_server.storage.disk import DISK, Disk
from atoll_server.storage.spool import Spool, StoredPayload

REGISTRAR = "registrar"  # name of the new directory if the registrar holds no fragments
DIRECTORY_BYTES = 16  # size of the value that identifies a shard's directory


@dataclass(frozen=True, slots=True)
class MovedFragment:
    """A fragment whose state is the same in its old and new directory. before, after: numbers of its old and new shard.

    checksums: CRC-32C checksums of theta, theta_pub and momentum.
    """

    fragment: int
    version: int
    before: int
    after: int
    checksums: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Resharded:
    """A run in its new directories: the registrar's directory, then those of the other shards in order."""

    directories: tuple[Path, ...]
    fragments: tuple[MovedFragment, ...]


@dataclass(slots=True)
class _Target:
    """A new directory. fragments: its fragments, in the order in which their states are written."""

    number: int
    directory: Path
    fragments: tuple[int, ...]
    identity: bytes
    db: sqlite3.Connection
    snapshot: SnapshotWriter
    row: SnapshotRow | None = None
    moved: dict[int, MovedFragment] = field(default_factory=dict)


def reshard(
    directories: Sequence[Path],
    shards: int,
    out: Path,
    *,
    alone: bool = False,
    logs: str = "",
    progress: Callable[[int, int], None] | None = None,
    disk: Disk = DISK,
    clock: Clock = SYSTEM,
) -> Resharded:
    """Writes a stopped run to new directories for a different number of shards. Learners keep their outstanding work.

    directories: directories of all the run's processes, in any order. shards: number of shards that hold fragments.
    out: folder for the new directories, which must not exist. alone: whether the registrar holds no fragments. logs:
    pattern of the registrar's log files to copy. progress: called with the number of moved fragments and the number of
    all fragments.

    The old directories are kept, but no core starts from them afterwards. Older checkpoints stay there. Raises
    SettingsError if a directory is missing, is in use or belongs to another run. Raises LedgerError, SnapshotError,
    SpoolError or TensorFileError if the content of a directory is damaged.

    Example: `reshard([Path("run")], 4, Path("run-4"))`
    """
    with contextlib.ExitStack() as stack:
        sources = open_shards(stack, directories, disk)
        registrar = registrar_of(sources, out)
        layout = stored_layout(registrar.meta)
        try:
            division = divide(layout, shards)
        except LayoutError as error:
            raise UsageError(f"--shards {shards}: {error}") from error
        check_room(out, layout.parameters, disk)
        part = new_folder(out, disk)
        move = _Move(sources, registrar, layout, division, part, alone=alone, disk=disk, clock=clock)
        with contextlib.ExitStack() as targets:
            move.open(targets)
            move.copy(logs, progress)
        crash_points.point("reshard.written")
        fragments = move.verified()
        for source in sorted(sources, key=lambda each: not each.registrar):  # so that a partly marked run cannot train
            with database.transaction(source.db):
                run_ledger.put_meta(source.db, run_ledger.MOVED, str(out.resolve()))
            crash_points.point("reshard.marked")
        disk.rename(part, out)
        disk.sync_directory(out.parent)
        crash_points.point("reshard.renamed")
        return Resharded(tuple(out / each.directory.name for each in move.targets), fragments)


# ------------------------------------------------------------------------------------------------- the move


class _Move:
    """The move of a run to new directories.

    targets: new directories, the registrar's first. part: folder of the targets.
    """

    def __init__(
        self,
        sources: Sequence[StoppedShard],
        registrar: StoppedShard,
        layout: Layout,
        division: Sequence[tuple[int, ...]],
        part: Path,
        *,
        alone: bool,
        disk: Disk,
        clock: Clock,
    ) -> None:
        self.targets: list[_Target] = []
        self._sources = sources
        self._registrar = registrar
        self._layout = layout
        self._division = division
        self._part = part
        self._alone = alone
        self._disk = disk
        self._clock = clock
        self._meta = registrar.meta
        self._learners = learners_of(sources, registrar)
        self._accounts = {row.name: TimeAccount.from_data(row.account) for row in self._learners}
        lengths = {each.index: each.length for each in layout.fragments}
        self._datasets = data_ledger.of_stopped_run(registrar.db, lengths)
        # This number is above all numbers in the old directories, so that no number ever names two different snapshots.
        self._snapshot = 1 + max(
            (
                *(row.id for source in sources for row in shard_ledger.snapshots(source.db)),
                *(each.id for each in manifests.manifests_of(self._meta)),
                *(each.checkpoint for each in lineage.line_of(self._meta).beginnings),
            ),
            default=0,
        )

    def open(self, stack: contextlib.ExitStack) -> None:
        """Creates the new directories with their ledgers, which stay open until the stack closes."""
        order = [index for source in self._sources for index in source.fragments()]
        shards = [(number, f"shard-{number}", owned) for number, owned in enumerate(self._division)]
        if self._alone:
            shards.insert(0, (len(self._division), REGISTRAR, ()))
        for number, name, owned in shards:
            directory = self._part / name
            for each in ("spool", "snapshots"):
                self._disk.make_directory(directory / each)
            db = database.open_ledger(directory / LEDGER, self._disk)
            stack.callback(db.close)
            fragments = tuple(sorted(owned, key=order.index))
            places = [self._layout.fragments[index] for index in fragments]
            writer = SnapshotWriter(snapshot_path(directory, self._snapshot), places, self._disk)
            identity = secrets.token_bytes(DIRECTORY_BYTES)
            self.targets.append(_Target(number, directory, fragments, identity, db, writer))

    def copy(self, logs: str, progress: Callable[[int, int], None] | None) -> None:
        """Writes all content of the new directories durably. logs, progress: see `reshard`."""
        owners = {index: target for target in self.targets for index in target.fragments}
        with contextlib.ExitStack() as stack:
            for target in self.targets:
                stack.enter_context(database.transaction(target.db))
            for target in self.targets:
                self._write_initial(target)
            ledgers = {index: target.db for index, target in owners.items()}
            databases = [source.db for source in self._sources]
            ledger_division.divide_rows(databases, ledgers, self._meta["generation"])
            ledger_division.check_counts(databases, [target.db for target in self.targets])
            for source in self._sources:
                self._copy_payloads(source, owners)
            for path in sorted(self._registrar.directory.glob(logs)) if logs else []:
                self._disk.copy(path, self.targets[0].directory / path.name, link=False)  # a core appends to its logs
            self._write_states(owners, progress)
            for target in self.targets:
                self._write_snapshot_row(target)
        for target in self.targets:
            target.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            for folder in (target.directory, *(each for each in target.directory.rglob("*") if each.is_dir())):
                self._disk.sync_directory(folder)
        self._disk.sync_directory(self._part)

    def _write_states(self, owners: dict[int, _Target], progress: Callable[[int, int], None] | None) -> None:
        """Restores one old directory at a time, so that memory holds at most the fragments of one old shard."""
        done, total = 0, len(self._layout.fragments)
        for target in self.targets:
            target.snapshot.begin()
        for source in self._sources:
            restored = restore(source.db, Origin.of(source.meta), source.directory, self._disk, self._clock)
            for index in source.fragments():
                state = restored.states.pop(index)
                target = owners[index]
                target.snapshot.add(index, state)
                moved = MovedFragment(index, state.version, source.number, target.number, state.checksums())
                target.moved[index] = moved
                done += 1
                if progress is not None:
                    progress(done, total)
        for target in self.targets:
            target.snapshot.finish()

    # ------------------------------------------------------------------------------ the run's values

    def _write_initial(self, target: _Target) -> None:
        """Writes the file of initial parameters, the run's values and the learners."""
        source, registrar = self._registrar.directory / INITIAL, target is self.targets[0]
        if registrar:
            check_initial(source, self._meta["initial_sha256"], self._disk)
            self._disk.copy(source, target.directory / INITIAL, link=True)
            data_ledger.copy(self._registrar.db, target.db)
            meta = self._registrar_meta(target)
        else:
            initial, digest = open_tensors(source, self._disk), hashlib.sha256()
            file = self._disk.create(target.directory / INITIAL)
            with contextlib.closing(file):
                for chunk in part_chunks(self._layout, initial, target.fragments):
                    digest.update(chunk)
                    file.write(chunk)
                file.sync()
            meta = self._shard_meta(target, digest.hexdigest())
        run_ledger.put_all_meta(target.db, meta)
        for row in self._learners:
            account = self._accounts[row.name]
            mine = account.moved(registrar=registrar)
            nonces = row.nonces if registrar else []
            run_ledger.put_learner(
                target.db, LearnerRow(row.name, row.region, row.incarnation, nonces, mine.as_data(), row.evicted)
            )

    def _registrar_meta(self, target: _Target) -> dict[str, Any]:
        """Returns the run's values for the new registrar."""
        removed = {"owned", "owned_parameters", run_ledger.MOVED, manifests.MANIFESTS, manifests.KEPT}
        meta = {key: value for key, value in self._meta.items() if key not in removed}
        others = {str(each.number): ["", each.identity.hex()] for each in self.targets if each is not target}
        meta[run_ledger.ATTACHED] = {"count": len(self._division), "shards": others, "alone": self._alone}
        if others:
            meta |= self._owned(target)
        if (restored := manifests.restored_of(self._meta)) is not None:  # the new directories are at this generation
            told = RestoredManifest(restored.generation, restored.checkpoint, {})
            meta[manifests.RESTORED] = asdict(told) | {"snapshots": []}
        return meta

    def _shard_meta(self, target: _Target, initial_sha256: str) -> dict[str, Any]:
        """Returns the run's values for a shard in a separate process. initial_sha256: the part's digest, in hex."""
        kept = ("protocol", "run", "generation", "session_key", "settings", "tensors", "fragments", "fingerprint")
        meta = {key: self._meta[key] for key in (*kept, lineage.META) if key in self._meta}
        return meta | self._owned(target) | {
            "epoch": max(source.meta["epoch"] for source in self._sources),
            "shard": [target.number, len(self._division)],
            "directory": target.identity.hex(),
            "initial_sha256": initial_sha256,
            run_ledger.STAGED: self._meta["initial_sha256"],
            run_ledger.VIEW: {
                "run_tokens": sum(account.counted_tokens() for account in self._accounts.values()),
                "voided_tokens": sum(account.uncounted_tokens() for account in self._accounts.values()),
                "paused": self._meta.get("paused", ""),
                "epoch": self._meta["epoch"],
            },
        }  # fmt: skip

    def _owned(self, target: _Target) -> dict[str, Any]:
        parameters = sum(self._layout.fragments[index].length for index in target.fragments)
        return {"owned": sorted(target.fragments), "owned_parameters": parameters}

    # ------------------------------------------------------------------------------ payloads and snapshots

    def _copy_payloads(self, source: StoppedShard, owners: dict[int, _Target]) -> None:
        """Copies the payloads of pending contributions, and those of merged contributions in a recorded run."""
        old, newest = Spool(source.directory / "spool", 0, 0, self._disk), self._meta["generation"]
        for generation in range(1, newest + 1):
            for row, fate in shard_ledger.contributions(source.db, generation, "AND fate<>'refused'"):
                path = old.path(generation, row.key)
                pending = fate.fate is Fate.PENDING
                if pending or (self._meta["settings"]["record"] and self._disk.exists(path)):
                    new = Spool(owners[row.key.fragment].directory / "spool", 0, 0, self._disk)
                    self._disk.make_directory(new.path(generation, row.key).parent)
                    self._disk.copy(path, new.path(generation, row.key), link=True)

    def _write_snapshot_row(self, target: _Target) -> None:
        """Adds the new snapshot to a ledger.

        If there are several shards, also adds a manifest to the registrar's ledger.
        """
        writer, generation, now = target.snapshot, self._meta["generation"], self._clock.wall()
        tokens = {name: account.counted_tokens() for name, account in self._accounts.items()}
        checksums = dict(writer.checksums)
        target.row = SnapshotRow(
            self._snapshot,
            generation,
            dict(writer.versions),
            checksums,
            tokens,
            now,
            writer.size_bytes,
            self._datasets,
        )
        shard_ledger.add_snapshot(target.db, target.row)
        if len(self.targets) == 1:
            return
        manifests.put_kept(target.db, KeptSnapshots(frozenset({self._snapshot}), self._snapshot))
        if target is self.targets[-1]:
            versions = {index: each.snapshot.versions[index] for each in self.targets for index in each.fragments}
            manifest = Manifest(
                id=self._snapshot,
                generation=generation,
                own=self.targets[0].number,
                snapshots={each.number: self._snapshot for each in self.targets},
                versions=versions,
                taken_at=now,
                size_bytes=sum(each.snapshot.size_bytes for each in self.targets),
                datasets=self._datasets,
            )
            manifests.put_manifests(self.targets[0].db, [manifest])

    # ------------------------------------------------------------------------------ the proof

    def verified(self) -> tuple[MovedFragment, ...]:
        """Reads the new directories as a starting core would, and compares them with the old ones.

        Returns the fragments in order. Raises SnapshotError, LedgerError or SpoolError for any difference.
        """
        found: list[MovedFragment] = []
        for target in self.targets:
            with database.read_ledger(target.directory / LEDGER) as db:
                assert target.row is not None, "`copy` sets it"
                places = [self._layout.fragments[index] for index in target.fragments]
                rows = shard_ledger.snapshots(db)
                assert [row.checksums for row in rows] == [
                    {index: target.moved[index].checksums for index in target.fragments}
                ], "the ledger has the checksums of the old states"
                load_snapshot(snapshot_path(target.directory, self._snapshot), places, rows[0], self._disk)
                spool = Spool(target.directory / "spool", 0, 0, self._disk)
                for row, _ in shard_ledger.contributions(db, self._meta["generation"], "AND fate='pending'"):
                    _stored(spool, self._meta["generation"], row).check(row.frames, row.digest)
                shard_ledger.check_rows(db)
            found += target.moved.values()
        return tuple(sorted(found, key=lambda each: each.fragment))


def _stored(spool: Spool, generation: int, row: ContributionRow) -> StoredPayload:
    return spool.open(generation, row.key, Codec(row.codec), np.array(row.norms_sq, np.float64), row.scale)
