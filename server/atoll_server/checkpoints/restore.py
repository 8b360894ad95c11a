"""Restores a run's state from its directory: loads the newest readable snapshot and replays all later merges.

The replay compares each merge with the checksums in the ledger. Starting cores and exports without a core use this
code. With `from_start`, the replay proves that the ledger reproduces the parameters byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import FragmentLayout, Layout, plan
from atoll_wire.layout.tensor_data import tensors_from_data
from atoll_wire.layout.tensor_header import TensorFileError
from atoll_wire.process.clock import SYSTEM, Clock

from atoll_server.checkpoints.snapshot import SnapshotError, load_snapshot, snapshot_path
from atoll_server.checkpoints.tensor_file import TensorFile, open_tensors
from atoll_server.ledger import lineage, manifests, run_ledger, shard_ledger
from atoll_server.ledger.database import LedgerError
from atoll_server.ledger.lineage import Line
from atoll_server.ledger.manifests import KeptSnapshots
from atoll_server.ledger.rows import ContributionRow, MergeRow, SnapshotRow
from atoll_server.merging import merge
from atoll_server.merging.merge import FragmentState, MergeResult, Update
from atoll_server.rounds.outer_rule import OuterRule
from atoll_server.rounds.syncer_events import ContributionKey
from atoll_server.storage.disk import DISK, Disk
from atoll_server.storage.spool import Spool

INITIAL = "initial.safetensors"
LEDGER = "ledger.sqlite"
RESTORING = "restoring"  # an empty file in a directory into which a backup is being restored; no core starts there
READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Restored:
    """A run's restored state, the updates of the replayed merges and the snapshots.

    states, updates: state and updates of each fragment in this directory. line: the generation's history. snapshots:
    snapshots in this history, except damaged ones that are newer than the loaded one. undone: snapshots outside this
    history, whose work a restore discarded but which operators can still restore. kept: snapshots that are named in
    checkpoints of several shards.
    """

    layout: Layout
    initial: TensorFile
    states: dict[int, FragmentState]
    updates: dict[int, list[Update]]
    snapshots: list[SnapshotRow]
    replay_s: float = 0.0  # duration of the replay in seconds
    line: Line = field(default_factory=Line)
    undone: list[SnapshotRow] = field(default_factory=list)
    kept: KeptSnapshots = field(default_factory=KeptSnapshots)


@dataclass(frozen=True, slots=True)
class Origin:
    """Values in the run's tables that a shard needs, in addition to its own tables, to restore its fragments.

    line: the generation's history. initial_sha256: hex digest of the initial parameters' file. owned: the fragments
    in this directory; None for all fragments of the run.
    """

    line: Line
    layout: Layout
    initial_sha256: str
    owned: frozenset[int] | None = None

    @classmethod
    def of(cls, meta: dict[str, Any], generation: int | None = None) -> Origin:
        """Returns the origin of a generation. Raises LedgerError as `stored_layout` does.

        meta: the run's values in the ledger. generation: None for the current one.
        """
        owned = frozenset(meta["owned"]) if "owned" in meta else None
        return cls(lineage.line_of(meta, generation), stored_layout(meta), meta["initial_sha256"], owned)

    def fragments(self) -> list[FragmentLayout]:
        """Returns the fragments in this directory, in order."""
        return [each for each in self.layout.fragments if self.owned is None or each.index in self.owned]


def stored_layout(meta: dict[str, Any]) -> Layout:
    """Returns the run's layout. Raises LedgerError if this version of Atoll computes a different layout."""
    layout = plan(tensors_from_data(meta["tensors"]), meta["fragments"])
    if layout.fingerprint.hex() != meta["fingerprint"]:
        raise LedgerError(
            "this version of Atoll computes a different layout for the run's tensors: "
            "use the version that started the run"
        )
    return layout


def initial_states(
    layout: Layout, initial: TensorFile, owned: Collection[int] | None = None
) -> dict[int, FragmentState]:
    """Returns the states of the owned fragments at version 0. Raises TensorFileError if any value is not finite.

    owned: None for all fragments. The values of the other fragments are only checked.
    """
    states = dict[int, FragmentState]()
    for fragment in layout.fragments:
        state = initial_state(layout, initial, fragment)
        if owned is None or fragment.index in owned:
            states[fragment.index] = state
    return states


def initial_state(layout: Layout, initial: TensorFile, fragment: FragmentLayout) -> FragmentState:
    """Returns the state of one fragment at version 0. Raises TensorFileError if a value is not finite.

    initial: the whole file, or a shard's part of it (see `shard_part`).
    """
    theta = np.empty(fragment.length, np.float32)
    for piece in fragment.pieces:
        name = layout.tensors[piece.tensor].name
        if name in initial.entries:
            values = initial.float32(name)[piece.start : piece.start + piece.length]
        else:
            values = initial.float32(name := piece.name)
        if not np.isfinite(values).all():
            raise TensorFileError(
                f'tensor "{name}" of the initial parameters has infinite or NaN values: use a model with finite values'
            )
        theta[piece.offset : piece.offset + piece.length] = values
        initial.forget()
    return merge.start(theta)


def check_initial(path: Path, sha256: str, disk: Disk, ending: threading.Event | None = None) -> None:
    """Compares the initial parameters' file with its digest. sha256: hex digest. ending: if set, the check stops early.

    The check does not use a memory map, since an unreadable page of a map would kill the process. Raises
    TensorFileError if the file has changed, and OSError if it cannot be read.
    """
    digest, offset = hashlib.sha256(), 0
    with contextlib.closing(disk.open(path)) as file:
        while offset < file.size and not (offset and ending is not None and ending.is_set()):
            digest.update(file.read_at(offset, min(READ_BYTES, file.size - offset)))
            offset += READ_BYTES
        if offset >= file.size and digest.hexdigest() != sha256:
            raise TensorFileError(f"{path} does not match its checksum: restore it from a backup")


def _log_unusable(error: SnapshotError) -> None:
    structlog.get_logger().error("ignoring a snapshot that is damaged or missing: check the disk", error=str(error))


def restore(
    db: sqlite3.Connection,
    origin: Origin,
    directory: Path,
    disk: Disk = DISK,
    clock: Clock = SYSTEM,
    *,
    from_start: bool = False,
    unusable: Callable[[SnapshotError], None] = _log_unusable,
) -> Restored:
    """Restores and returns a generation's state. Compares the checksums of each replayed merge with the ledger.

    from_start: whether to replay from version 0, which needs the payloads of the whole run (--record). unusable: called
    for each damaged snapshot that is skipped. Raises LedgerError, SpoolError or TensorFileError with a message that
    names the damaged item.
    """
    line, layout, fragments = origin.line, origin.layout, origin.fragments()
    initial = open_tensors(directory / INITIAL, disk)
    snapshots = lineage.snapshots(db, line)
    undone = [row for row in shard_ledger.snapshots(db) if not line.has(row)]
    states = None if from_start else _newest_sound(snapshots, directory, fragments, disk, unusable)
    if states is None:
        check_initial(initial.path, origin.initial_sha256, disk)
        states = {each.index: initial_state(layout, initial, each) for each in fragments}
    spool = Spool(directory / "spool", limit_bytes=0, kept_bytes=0, disk=disk)
    updates: dict[int, list[Update]] = {}
    began = clock.monotonic()
    for fragment in fragments:
        state = states[fragment.index]
        for made_in, row in lineage.merges(db, line, fragment.index, after=state.version):
            merged = merge_again(db, spool, made_in, fragment, state, row)
            check_merge(merged, row)
            updates.setdefault(fragment.index, []).append(merged.update)
            state = merged.state
        states[fragment.index] = state
    took_s, kept = clock.monotonic() - began, manifests.kept_of(run_ledger.get_meta(db))
    return Restored(layout, initial, states, updates, snapshots, took_s, line, undone, kept)


def _newest_sound(
    snapshots: list[SnapshotRow],
    directory: Path,
    fragments: Sequence[FragmentLayout],
    disk: Disk,
    unusable: Callable[[SnapshotError], None],
) -> dict[int, FragmentState] | None:
    """Returns the fragments' states in the newest readable snapshot, or None if no snapshot is readable.

    Removes newer, unreadable snapshots from `snapshots`.
    """
    while snapshots:
        try:
            return load_snapshot(snapshot_path(directory, snapshots[-1].id), fragments, snapshots[-1], disk)
        except SnapshotError as error:
            unusable(error)  # an older snapshot and a longer replay give the same state
            snapshots.pop()
    return None


def merge_again(
    db: sqlite3.Connection, spool: Spool, generation: int, fragment: FragmentLayout, state: FragmentState, row: MergeRow
) -> MergeResult:
    """Repeats one merge with the contributions from the ledger and the spool. `check_merge` verifies the result.

    generation: the generation in which the merge was made. state: the fragment's state before the merge.
    Raises LedgerError or SpoolError if a contribution is missing or damaged.
    """
    stored = []
    for learner, incarnation, seq, _, _ in row.shares:
        key = ContributionKey(learner, incarnation, fragment.index, seq)
        sent = contribution_of(db, generation, key)
        norms_sq = np.array(sent.norms_sq, np.float64)
        stored.append(spool.open(generation, key, Codec(sent.codec), norms_sq, sent.scale))
    weights = [share[3] for share in row.shares]
    rule = OuterRule(row.rule["lr"], row.rule["momentum"], Codec(row.rule["codec"]), row.rule["heat"])
    try:
        return merge.merge(fragment, state, stored, weights, rule, state.theta_pub)
    finally:
        for each in stored:
            each.close()


def check_merge(merged: MergeResult, row: MergeRow) -> None:
    """Raises LedgerError if the checksums of a repeated merge differ from those in the ledger."""
    found, logged = merged.checksums, (row.theta, row.theta_pub, row.momentum)
    if found != logged:
        raise LedgerError(
            f"the replay of fragment {row.fragment} version {row.version} gives checksums {found}, but the ledger has "
            f"{logged} (faulty disk or CPU): restore a backup on another machine"
        )


def contribution_of(db: sqlite3.Connection, generation: int, key: ContributionKey) -> ContributionRow:
    """Returns a contribution's row from the ledger. Raises LedgerError if the row is missing."""
    found = shard_ledger.contribution(db, generation, key)
    if found is None:
        raise LedgerError(f"the ledger has a merge but not its contribution {key}: restore a backup")
    return found[0]


def drop_damaged(db: sqlite3.Connection, directory: Path, restored: Restored, disk: Disk) -> bool:
    """Removes damaged snapshots from the ledger and deletes snapshot files that the ledger does not list.

    Returns whether any snapshot was damaged.
    """
    sound = [*restored.snapshots, *restored.undone]
    damaged = [row for row in shard_ledger.snapshots(db) if row not in sound]
    for row in damaged:
        shard_ledger.drop_snapshot(db, row.id)
    kept = {snapshot_path(directory, row.id) for row in sound}
    for path in disk.files(directory / "snapshots"):
        if path not in kept:
            disk.remove(path)
    return bool(damaged)
