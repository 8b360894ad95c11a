"""Implements `atoll checkpoint verify`, `backup` and `restore-backup`, which check and copy a run's directory."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from atoll_wire.cli.option_groups import output, takes
from atoll_wire.cli.output import Format, show_lines
from atoll_wire.errors import UsageError, UserError, need

KEEPING = ("numba", "zstandard")
NO_RUN_S = 10.0  # seconds between checks for a run's first parameters
AGAIN_S = 60.0  # longest wait in seconds after a failed backup


def register(checkpoint: typer.Typer) -> None:
    """Adds the commands to `atoll checkpoint`."""
    checkpoint.command("verify")(verify_command)
    checkpoint.command("backup")(backup_command)
    checkpoint.command("restore-backup")(restore_command)


@takes(form=output)
def verify_command(
    form: Format,
    directory: Annotated[
        Path,
        typer.Argument(help="A backup, or the directory of a run that no core uses at the same time."),
    ],
) -> None:
    """Check whether a core can start from a backup, or from a stopped run's directory.

    The command changes no files. It reads the whole ledger, all snapshots, the initial parameters and the payloads.
    It repeats the same merges as a starting core and needs about as much memory. It prints a warning for damage that
    does not prevent a start. The exit status is 1 if a core could not start or continue or if pages of the ledger are
    damaged.
    """
    need("checkpoint verify", "server", *KEEPING)
    from atoll_server.cli.verify import verify

    verify(directory, form)


@takes(form=output)
def backup_command(
    form: Format,
    root: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the backups of this directory, on another disk.")
    ],
    directory: Annotated[
        Path,
        typer.Option(
            "--dir", help="Directory of a core or a shard, which may be running.", envvar="ATOLL_CHECKPOINT_BACKUP_DIR"
        ),
    ],
    keep: Annotated[
        int, typer.Option(help="Number of backups to keep.", envvar="ATOLL_CHECKPOINT_BACKUP_KEEP", min=1)
    ] = 3,
    every_s: Annotated[
        float,
        typer.Option(
            "--every-s",
            help="Take a backup at each multiple of this time since 1970 until SIGTERM. A failed backup is repeated "
            "within a minute. Default: take one backup.",
            envvar="ATOLL_CHECKPOINT_BACKUP_EVERY_S",
            min=0.0,
        ),
    ] = 0.0,
) -> None:
    """Back up a run's directory. The core may be running. Neither learners nor the core wait for the backup.

    Each backup is a new folder with a verified copy of the ledger, the newest snapshot, the initial parameters, and
    the payloads that no snapshot covers. Unchanged files are hard links to the previous backup. A failed backup
    leaves no files. Without --every-s, the command then exits with status 1. The command needs memory for one fragment.
    """
    need("checkpoint backup", "server", *KEEPING)
    if every_s and form is Format.JSON:
        raise UsageError("--every-s and --json cannot be combined: give --output jsonl for one line per backup")
    from atoll_server.storage import crash_points

    if wanted := os.environ.get("ATOLL_CRASH_AT"):  # tests only
        crash_points.watch(crash_points.kill_at(wanted))
    if every_s:
        _keep_backing_up(directory, root, keep, every_s, form)
    else:
        _back_up(directory, root, keep, form)


def _back_up(directory: Path, root: Path, keep: int, form: Format) -> None:
    from atoll_server.backups.backup import back_up

    done = back_up(directory, root, keep)
    record = done.record
    removed = f", {done.removed} old backups removed" if done.removed else ""
    text = (
        f"backup {done.path} verified: {record.merges():,} merges (generation {record.generation}), "
        f"{done.copied_bytes / 1e6:.1f} MB copied, {done.linked_bytes / 1e6:.1f} MB shared with the previous backup, "
        f"{done.took_s:.1f} s{removed}"
    )
    found = {
        "path": str(done.path),
        "run": record.run,
        "shard": record.shard,
        "generation": record.generation,
        "merges": record.merges(),
        "taken_at": record.taken_at,
        "copied_bytes": done.copied_bytes,
        "linked_bytes": done.linked_bytes,
        "removed": done.removed,
        "took_s": done.took_s,
    }
    show_lines(found, form, [text])


def _keep_backing_up(directory: Path, root: Path, keep: int, every_s: float, form: Format) -> NoReturn:
    """Takes a backup at each multiple of `every_s` since 1970 until SIGTERM. Waits until there is a run.

    The multiples are the same on all machines, so the backups of several shards are taken at almost the same time.
    After a failed backup, the process continues. If it ended, Kubernetes would remove the core in the same pod from its
    Service.
    """
    from atoll_wire.process.clock import SYSTEM

    from atoll_server.backups.backup import has_run
    from atoll_server.backups.backup_folder import newest_in

    def end(*_: object) -> NoReturn:
        raise SystemExit(0)  # ends a running backup, which is then incomplete

    signal.signal(signal.SIGTERM, end)
    pause, said = threading.Event(), False
    while True:
        try:
            newest = newest_in(root)
            due_s = (newest[1].taken_at // every_s + 1) * every_s - SYSTEM.wall() if newest else 0.0
            if due_s <= 0.0 and not has_run(directory):
                due_s = NO_RUN_S
                if not said:
                    waits = f"waiting: {directory} has no run with parameters yet"
                    print(waits, file=sys.stderr if form.is_json else sys.stdout, flush=True)
                said = True
            if due_s <= 0.0:
                _back_up(directory, root, keep, form)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            due_s = min(every_s, AGAIN_S)
        if due_s > 0.0:
            pause.wait(due_s)


def restore_command(
    backup: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder of one backup.")],
    directory: Annotated[
        Path,
        typer.Option(
            "--dir",
            help="New directory for a core. It must be empty or contain a run without parameters.",
            envvar="ATOLL_CHECKPOINT_RESTORE_BACKUP_DIR",
        ),
    ],
    checkpoint: Annotated[
        int,
        typer.Option(
            help="For the registrar of several shards: the checkpoint to continue from. Default: the newest.",
            envvar="ATOLL_CHECKPOINT_RESTORE_BACKUP_CHECKPOINT",
            min=0,
        ),
    ] = 0,
) -> None:
    """Restore a backup into a new directory. A new generation begins with the backup's parameters, bit for bit.

    The command verifies all files and repeats the merges after the backup's snapshot. It needs as much memory as a
    core. After an interruption, run it again: no core starts from the directory until the command has finished. The
    backup is not changed.
    """
    need("checkpoint restore-backup", "server", *KEEPING)
    from atoll_server.backups.restoring import restore_backup
    from atoll_server.cli.tables import moment
    from atoll_server.storage import crash_points

    if wanted := os.environ.get("ATOLL_CRASH_AT"):  # tests only
        crash_points.watch(crash_points.kill_at(wanted))
    done = restore_backup(backup, directory, checkpoint)
    record, rolled_back = done.record, done.rolled_back
    if rolled_back is None:
        print(f"restored shard {record.shard} from the backup of {moment(record.taken_at)}: {record.merges():,} merges")
        print("start the shard: it rolls back to the run's checkpoint when it attaches to the registrar")
        return
    print(
        f"restored from the backup of {moment(record.taken_at)} (generation {rolled_back.generation}): "
        f"{rolled_back.merges:,} merges"
    )
    if rolled_back.shards:
        snapshots = record.checkpoints[checkpoint or max(record.checkpoints)]
        others = ", ".join(f"shard {at}: snapshot {each}" for at, each in snapshots.items() if at != record.shard)
        print(f"the other shards need these snapshots, in their directories or in a restored backup: {others}")
    print("start the core: learners continue from the backup and discard later work")
