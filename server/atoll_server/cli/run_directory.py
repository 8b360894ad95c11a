"""Reads a run's directory without a core, to export the model, replay merges or restore a checkpoint."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll_wire.cli.output import Format
from atoll_wire.errors import SettingsError
from atoll_wire.layout.layout import Layout
from atoll_wire.model_file import model_file
from atoll_wire.model_file.export_summary import export_summary
from atoll_wire.model_file.model_file import RunId

from atoll_server.checkpoints.restore import LEDGER, Origin, Restored, check_initial, initial_states, restore
from atoll_server.checkpoints.rollback import roll_back
from atoll_server.checkpoints.tensor_file import TensorFile
from atoll_server.cli.export_target import export_target
from atoll_server.cli.tables import print_checkpoints
from atoll_server.ledger import run_ledger, shard_ledger
from atoll_server.ledger.database import read_ledger
from atoll_server.ledger.manifests import manifests_of
from atoll_server.merging.merge import FragmentState
from atoll_server.run.summaries import checkpoint, manifest_message
from atoll_server.storage.disk import DISK


def read_run(
    directory: Path, *, from_start: bool = False, check: bool = False, generation: int | None = None
) -> Restored:
    """Returns the state that a core would start from.

    from_start: whether to replay the whole ledger, which needs --record. check: whether to also compare the initial
    parameters' file with its digest, since an export copies tensors from this file. generation: None for the current
    one. Raises SettingsError if the directory contains no run or the generation does not exist.
    """
    with ledger_of(directory) as db:
        meta = run_ledger.get_meta(db)
        if generation is not None and not 1 <= generation <= meta["generation"]:
            raise SettingsError(
                f"--generation {generation} does not exist: the run in {directory} has generations 1 to "
                f"{meta['generation']}"
            )
        run = restore(db, Origin.of(meta, generation), directory, from_start=from_start)
        if check:
            check_initial(run.initial.path, meta["initial_sha256"], DISK)
        return run


def run_id(directory: Path, generation: int | None = None) -> RunId:
    """Returns the identity of the run in a directory. generation: None for the current one. Raises SettingsError."""
    with ledger_of(directory) as db:
        meta = run_ledger.get_meta(db)
    return RunId(meta["run"], meta["generation"] if generation is None else generation)


def shard_number(meta: dict[str, Any]) -> int:
    """Returns the number of the shard whose fragments are in a directory. meta: the run's values in its ledger."""
    number: int = meta.get("shard", [0])[0]
    return number


def check_whole_model(directory: Path) -> None:
    """Raises SettingsError if a directory contains no run or only some of the run's fragments."""
    with ledger_of(directory) as db:
        meta = run_ledger.get_meta(db)
    if "owned" in meta:
        raise SettingsError(
            f"{directory} holds {len(meta['owned'])} of the run's {meta['fragments']} fragments, but a model file "
            "needs all of them: use `atoll checkpoint export OUT --server` with the registrar's address"
        )


@contextmanager
def ledger_of(directory: Path, *, unused: bool = False) -> Iterator[sqlite3.Connection]:
    """Context manager that opens a run's ledger read-only. unused: whether it is certain that no core uses the ledger.

    Raises SettingsError if there is no run or the run has no parameters, and LedgerError if the ledger is damaged.
    """
    path = directory / LEDGER
    if not path.is_file():
        raise SettingsError(f"{directory} holds no run: give the directory that a core was started with")
    with read_ledger(path, unused=unused) as db:
        if "fingerprint" not in run_ledger.get_meta(db):
            raise SettingsError(f"the run in {directory} has no parameters yet: start a learner first")
        yield db


def list_from_directory(directory: Path, form: Format = Format.TABLE) -> None:
    """Prints the checkpoints in a run's directory."""
    with ledger_of(directory) as db:
        meta = run_ledger.get_meta(db)
        if "owned" in meta and "shard" not in meta:
            print_checkpoints(map(manifest_message, manifests_of(meta)), form)
            return
        if "owned" in meta and not form.is_json:
            print(f"snapshots of shard {shard_number(meta)}: the registrar's directory has the run's checkpoints")
        print_checkpoints([checkpoint(row) for row in shard_ledger.snapshots(db)], form)


def restore_checkpoint(directory: Path, checkpoint: int) -> None:
    """Restores the run in a directory to a checkpoint and prints the result. Raises the same errors as `roll_back`."""
    done = roll_back(directory, checkpoint)
    if not done.began:
        print(f"the run is already at checkpoint {checkpoint} (generation {done.generation}): {done.merges} merges")
        return
    print(f"restored to checkpoint {checkpoint} (generation {done.generation}): {done.merges} merges")
    if done.shards:
        print(f"start the registrar: the other shards ({done.shards}) restore their parts when they attach")
    print("start the core: learners continue from the checkpoint and discard later work")


def export_from_directory(
    directory: Path, out: Path, *, initial: bool, max_file_bytes: int | None = None, adapter: Path | None = None
) -> None:
    """Writes the published model from a run's directory. initial: whether to write the initial parameters instead.

    max_file_bytes, adapter: see `export_target`.
    """
    check_whole_model(directory)
    run = read_run(directory, check=True)
    states = initial_states(run.layout, run.initial) if initial else run.states
    write_model(out, run.layout, run.initial, states, run_id(directory), max_file_bytes, adapter)
    show_export(out)


def write_model(
    out: Path,
    layout: Layout,
    initial: TensorFile,
    states: Mapping[int, FragmentState],
    run: RunId | None,
    max_file_bytes: int | None = None,
    adapter: Path | None = None,
) -> None:
    """Writes the published model from these states, completely or not at all.

    run: see `model_file.write_model`. Raises ExportError.
    """
    with export_target(out, max_file_bytes, adapter) as target:
        model_file.write_model(target, layout, initial, states, run)


def show_export(out: Path) -> None:
    """Prints a line about a written model."""
    print("\n".join(export_summary(out)))
