"""Reads a run's directory without a core, for exports and replays."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from atoll_wire.errors import SettingsError
from atoll_wire.layout.layout import Layout

from atoll_server.checkpoints.export import write_checkpoint
from atoll_server.checkpoints.restore import LEDGER, Origin, Restored, check_initial, initial_states, restore
from atoll_server.checkpoints.rollback import roll_back
from atoll_server.checkpoints.tensor_file import TensorFile
from atoll_server.checkpoints.unshared_tensors import warning_of
from atoll_server.cli.tables import print_checkpoints
from atoll_server.merging.merge import FragmentState
from atoll_server.service.operator_service import checkpoint
from atoll_server.storage import run_ledger, shard_ledger
from atoll_server.storage.database import read_ledger
from atoll_server.storage.disk import DISK


def read_run(
    directory: Path, *, from_start: bool = False, check: bool = False, generation: int | None = None
) -> Restored:
    """The state that a core would start with. from_start: replay the whole ledger (needs --record).

    check: read all first parameters too and compare their digest; an export has tensors that never change. generation:
    another than the current one. Raises SettingsError when there is none of that number.
    """
    with ledger_of(directory) as db:
        meta = run_ledger.get_meta(db)
        if generation is not None and not 1 <= generation <= meta["generation"]:
            raise SettingsError(f"--generation {generation}: the run in {directory} has 1 to {meta['generation']}")
        run = restore(db, Origin.of(meta, generation), directory, from_start=from_start)
        if check:
            check_initial(run.initial.path, meta["initial_sha256"], DISK)
        return run


@contextmanager
def ledger_of(directory: Path) -> Iterator[sqlite3.Connection]:
    """Opens the ledger of a run that has parameters, read-only. Raises SettingsError, LedgerError."""
    path = directory / LEDGER
    if not path.is_file():
        raise SettingsError(f"{directory} holds no run: give the directory that a core was started with")
    with read_ledger(path) as db:
        if "fingerprint" not in run_ledger.get_meta(db):
            raise SettingsError(f"the run in {directory} has no parameters yet: start a learner first")
        yield db


def list_from_directory(directory: Path) -> None:
    """Prints the checkpoints of a run's directory."""
    with ledger_of(directory) as db:
        print_checkpoints([checkpoint(row) for row in shard_ledger.snapshots(db)])


def restore_checkpoint(directory: Path, checkpoint: int) -> None:
    """Takes the run in a directory back to a checkpoint, and says so. Raises SettingsError, LedgerError."""
    done = roll_back(directory, checkpoint)
    merges = sum(done.row.versions.values())
    if not done.began:
        print(f"the run is at checkpoint {checkpoint} already: generation {done.generation}, {merges} merges")
        return
    print(f"restored to checkpoint {checkpoint} (generation {done.generation}): {merges} merges")
    print("start the core: learners follow by themselves, and give up what they trained since")


def export_from_directory(directory: Path, out: Path, *, initial: bool) -> None:
    """Writes the published model from a run's directory. initial: the first parameters, else the last durable state."""
    run = read_run(directory, check=True)
    write_model(out, run.layout, run.initial, initial_states(run.layout, run.initial) if initial else run.states)


def write_model(out: Path, layout: Layout, initial: TensorFile, states: Mapping[int, FragmentState]) -> None:
    """Writes the published model at these states, completely or not at all, and prints a line. Raises SettingsError."""
    part = out.with_name(out.name + ".part")
    try:
        with part.open("wb") as file:
            size = write_checkpoint(file, layout, initial, states)
        part.rename(out)
    except OSError as error:
        raise SettingsError(f"{out} cannot be written ({error.strerror}): give another path") from error
    finally:
        part.unlink(missing_ok=True)
    print(f"wrote {out} ({size / 1e6:.1f} MB)")
    if any(state.version for state in states.values()) and (stale := warning_of(out)):
        print(f"warning: {stale}")
