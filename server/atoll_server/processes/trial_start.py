"""Restores a run from its directory as a starting core does, but without changing the directory."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from atoll_wire.errors import SettingsError
from atoll_wire.process.clock import SYSTEM

from atoll_server.checkpoints.restore import Origin, Restored, restore
from atoll_server.checkpoints.snapshot import SnapshotError
from atoll_server.ledger import lineage, run_ledger
from atoll_server.ledger.ledger_writer import LedgerWriter
from atoll_server.ledger.rows import ContributionRow
from atoll_server.processes.core_process import check_startable
from atoll_server.run.initial_parameters import STAGING
from atoll_server.run.registrar import Registrar
from atoll_server.run.run_clock import RunClock
from atoll_server.settings import CoreSettings
from atoll_server.shard.fragment import HeldContribution
from atoll_server.shard.shard import Shard
from atoll_server.shard.shard_restore import restore_shard
from atoll_server.shard.snapshotter import covered
from atoll_server.shard_context.context import ShardContext
from atoll_server.storage.disk import ReadOnlyDisk
from atoll_server.telemetry.journal import Journal
from atoll_server.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class TrialStart:
    """The state that a core would start from.

    pending: acknowledged contributions that are not yet merged or refused. kept: merged contributions that fewer than
    two snapshots cover, each with its generation. A payload in `kept` may be missing if the newest snapshot covers it.
    """

    restored: Restored
    pending: list[HeldContribution]
    kept: list[tuple[int, ContributionRow]]


def trial_start(db: sqlite3.Connection, directory: Path) -> TrialStart:
    """Restores a run that has parameters. db: a read-only connection to its ledger.

    Raises SettingsError, LedgerError, SpoolError or TensorFileError if a core could not start from this directory.
    """
    for name in ("spool", "snapshots", STAGING):
        if (path := directory / name).exists() and not path.is_dir():
            raise SettingsError(f"{path} cannot be used (it is not a directory): restore a backup")
    disk, journal = ReadOnlyDisk(), Journal()
    meta = run_ledger.get_meta(db)
    check_startable(meta)
    settings = CoreSettings(listen=(), directory=directory)
    registrar = Registrar(settings.limits, RunClock(SYSTEM), journal)
    registrar.restore(meta, run_ledger.learners(db), LedgerWriter(db, _fail, SYSTEM))
    restored = restore(db, Origin.of(meta), directory, disk, unusable=_passed_over)
    context = ShardContext(
        settings=settings,
        run=registrar.settings,
        generation=registrar.generation,
        shards=meta.get("shard", [0, 1])[1],
        number=meta.get("shard", [0])[0],
        registry=registrar.registry,
        journal=journal,
        writer=registrar.writer,
        metrics=Metrics(),
        disk=disk,
        clock=registrar.clock,
        fail=_fail,
    )
    shard = Shard(context, restored, registrar.view(), damaged=False)
    restore_shard(shard, db, restored)
    pending = [held for fragment in shard.fragments.values() for held in fragment.held.values()]
    kept = [
        (generation, row)
        for fragment, after in covered(restored.snapshots, shard.fragments).items()
        for generation, row, _ in lineage.merged(db, restored.line, fragment, after)
    ]
    return TrialStart(restored, pending, kept)


def _passed_over(_error: SnapshotError) -> None:
    """Does nothing, because the caller checks all snapshots and reports damaged ones."""


def _fail(error: BaseException) -> None:
    raise error
