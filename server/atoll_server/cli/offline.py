"""Reads a run's directory without a core, for exports and replays."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from atoll_wire.errors import SettingsError
from atoll_wire.layout import Layout

from atoll_server.checkpoints.export import write_checkpoint
from atoll_server.checkpoints.restore import LEDGER, Restored, check_initial, initial_states, restore
from atoll_server.checkpoints.tensor_file import TensorFile
from atoll_server.checkpoints.unshared_tensors import warning_of
from atoll_server.merging.merge import FragmentState
from atoll_server.storage import ledger
from atoll_server.storage.database import read_ledger
from atoll_server.storage.disk import DISK


def read_run(directory: Path, *, from_start: bool = False, check: bool = False) -> Restored:
    """The state that a core would start with. from_start: replay the whole ledger (needs --record).

    check: read all first parameters too and compare their digest; an export has tensors that never change.
    """
    with run_ledger(directory) as db:
        meta = ledger.get_meta(db)
        run = restore(db, directory, from_start=from_start)
        if check:
            check_initial(run.initial.path, meta["initial_sha256"], DISK)
        return run


@contextmanager
def run_ledger(directory: Path) -> Iterator[sqlite3.Connection]:
    """Opens the ledger of a run that has parameters, read-only. Raises SettingsError, LedgerError."""
    path = directory / LEDGER
    if not path.is_file():
        raise SettingsError(f"{directory} holds no run: give the directory that a core was started with")
    with read_ledger(path) as db:
        if "fingerprint" not in ledger.get_meta(db):
            raise SettingsError(f"the run in {directory} has no parameters yet: start a learner first")
        yield db


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
