"""Implements `atoll reshard`, which divides a stopped run among a different number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll_wire.cli.output import console
from atoll_wire.errors import SettingsError
from rich.progress import Progress
from rich.table import Table

from atoll_server.checkpoints.resharding import Resharded, reshard
from atoll_server.checkpoints.restore import LEDGER
from atoll_server.service.server import AUDIT_LOG


def reshard_directories(given: Sequence[Path], shards: int, out: Path | None, *, alone: bool) -> None:
    """Moves the run in these directories, or in the subfolders of one given folder. Prints how to start the moved run.

    out: folder for the new directories; None for a folder next to the first given folder. Raises the same errors as
    `reshard`.
    """
    directories = [each for folder in given for each in _directories(folder)]
    target = out or given[0].absolute().with_name(f"{given[0].absolute().name}-{shards}-shards")
    shown = console()
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task("fragments")
        done = reshard(
            directories,
            shards,
            target,
            alone=alone,
            logs=f"{AUDIT_LOG}*",
            progress=lambda count, total: progress.update(task, completed=count, total=total),
        )
    table = Table("fragment", "version", "old shard", "new shard", "theta", "published", "momentum")
    for each in done.fragments:
        checksums = (f"{value:08x}" for value in each.checksums)
        table.add_row(str(each.fragment), str(each.version), str(each.before), str(each.after), *checksums)
    shown.print(table)
    merges = sum(each.version for each in done.fragments)
    print(f"{len(done.fragments)} fragments with {merges:,} merges moved: all checksums are the same as before")
    print("start the cores with these directories and your other options:")
    for line in _starts(done, shards, alone=alone):
        print(f"  {line}")
    print("the old directories are kept, but no core starts from them: remove them once the run trains")


def _directories(folder: Path) -> list[Path]:
    """Returns the folder if it is a core's directory; otherwise, the cores' directories in the folder."""
    if (folder / LEDGER).is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob(f"*/{LEDGER}")) if folder.is_dir() else []
    if not found:
        raise SettingsError(f"{folder} holds no run: give the --dir of each of the run's cores, or their folder")
    return found


def _starts(done: Resharded, shards: int, *, alone: bool) -> list[str]:
    """Returns a command for each process, without the options that did not change."""
    registrar, *others = done.directories
    first = " --registrar-only" if alone else f" --shard 0/{shards}" if shards > 1 else ""
    commands = [f"atoll core --dir {registrar}{first}"]
    for number, directory in enumerate(others, start=0 if alone else 1):
        commands.append(f"atoll core --dir {directory} --shard {number}/{shards} --registrar HOST:PORT")
    return commands
