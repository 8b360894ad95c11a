"""Subcommands of `atoll` for operators of a core: core, status, receipts, pause, resume, evict, checkpoint, token,
replay, reshard.

Each command imports its dependencies only when it runs, so that `atoll --help` is fast and a front's image stays small.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from atoll_wire.cli import context_commands
from atoll_wire.cli.option_groups import Reach, confirm, core, count, output, size, takes
from atoll_wire.cli.output import Format, console
from atoll_wire.errors import UsageError, need
from atoll_wire.process import lazy_commands

from atoll_server.cli import backup_commands

KEEPING = ("numba", "zstandard")
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands to `atoll`."""
    text = "Run a core, the outer optimizer of one run. A core needs only a directory and a port."
    lazy_commands.add(app, "core", text, _start_core)
    app.command("status")(status_command)
    app.command("receipts")(receipts_command)
    app.command("pause")(pause_command)
    app.command("resume")(resume_command)
    app.command("evict")(evict_command)
    app.command("token")(token_command)
    app.command("replay")(replay_command)
    app.command("reshard")(reshard_command)
    checkpoint = typer.Typer(
        no_args_is_help=True, help="List, take, verify, restore, export and back up checkpoints of a run."
    )
    checkpoint.command("list")(checkpoint_list)
    checkpoint.command("take")(checkpoint_take)
    checkpoint.command("restore")(checkpoint_restore)
    checkpoint.command("export")(checkpoint_export)
    backup_commands.register(checkpoint)
    app.add_typer(checkpoint, name="checkpoint")
    context_commands.register(app)


def register_doctor(app: typer.Typer) -> None:
    """Adds `atoll doctor` without the comparison of models, for installations without the learner's package."""
    text = "Check the connection to a core, and its disk. The exit status is 1 if a check fails."
    lazy_commands.add(app, "doctor", text, _doctor)


def _doctor() -> lazy_commands.Command:
    from atoll_wire.doctor import DoctorSettings, report
    from atoll_wire.process.settings import command

    def doctor(settings: DoctorSettings, form: Format) -> None:
        raise typer.Exit(report(settings, form))

    return command(doctor, DoctorSettings, form=output)


def _start_core() -> lazy_commands.Command:
    from atoll_wire.process.settings import Given, Logs, command

    from atoll_server.settings import CoreSettings, RunSettings

    def core(settings: CoreSettings, given: dict[str, Any], logs: Logs) -> None:
        need("core", "server", *KEEPING)
        from atoll_server.service.server import serve
        from atoll_server.storage import crash_points

        logs.begin()
        if wanted := os.environ.get("ATOLL_CRASH_AT"):  # tests only
            crash_points.watch(crash_points.kill_at(wanted))
        asyncio.run(
            serve(settings, given, announce=lambda address: print(f"atoll core listens on {address}", flush=True))
        )

    return command(core, CoreSettings, Given(RunSettings), Logs)


@takes(reach=core, form=output)
def status_command(
    reach: Reach,
    form: Format,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
) -> None:
    """Show the status of a run: goodput, learners, fragments, contributions and bytes."""
    from atoll_server.cli.watch import show_status, watch_status

    if watch and form is Format.JSON:
        raise UsageError("--watch and --json cannot be combined: give --output jsonl for one line per second")
    (watch_status if watch else show_status)(_target(reach), form)


@takes(reach=core)
def pause_command(
    reach: Reach,
    reason: Annotated[str, typer.Option(help="Reason to show to learners and operators.")] = "no reason given",
    yes: Yes = False,
) -> None:
    """Pause the run until `atoll resume`, even if the core restarts. Learners wait in step(), and no round opens."""
    from atoll_server.cli.operator_client import pause

    confirm(f"Pause the run at {reach.servers[0]}? All learners stop training.", "pause", yes=yes)
    pause(_target(reach), reason or "no reason given")


@takes(reach=core)
def resume_command(reach: Reach) -> None:
    """Resume a run that `atoll pause` paused."""
    from atoll_server.cli.operator_client import pause

    pause(_target(reach), "")


@takes(reach=core, form=output)
def receipts_command(
    reach: Reach,
    form: Format,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Read the run in this directory instead of calling a core.", envvar="ATOLL_RECEIPTS_DIR"
        ),
    ] = None,
    learner: Annotated[str, typer.Option(help="Show only contributions of this learner.")] = "",
    fate: Annotated[str, typer.Option(help="Show only contributions with this fate: pending, merged or refused.")] = "",
    last: Annotated[int, typer.Option(help="Number of newest contributions to show.", min=1)] = 50,
) -> None:
    """Show the fate of contributions: merged (version, weight), refused (reason), or pending."""
    need("receipts", "server", *KEEPING)
    from atoll_server.cli.receipts import from_core, from_directory, show_receipts

    if directory is not None:
        found = from_directory(directory, learner, fate, last)
    else:
        found = from_core(_target(reach), learner, fate, last)
    show_receipts(found, form)


@takes(reach=core)
def evict_command(
    learner: Annotated[str, typer.Argument(help="Name of the learner.")],
    reach: Reach,
    reason: Annotated[str, typer.Option(help="Reason to record and to show to the learner.")] = "by an operator",
    undo: Annotated[bool, typer.Option("--undo", help="Let the learner join again.")] = False,
    tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="<count>",
            help="Number of the learner's reported tokens that still count, if its reports were false.",
        ),
    ] = None,
    gone: Annotated[
        bool, typer.Option("--gone", help="Instead, record that the learner left, since its process has ended.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Evict a learner. It stops and cannot join again, nor can new processes of its fleet certificate.

    The core refuses its pending contributions. For a learner that only ended, use --gone: its work stays, and its name
    may join again.
    """
    from atoll_server.cli.operator_client import evict, write_off

    if gone and (undo or tokens is not None):
        raise UsageError("--gone excludes --undo and --tokens: omit one of them")
    if gone:
        write_off(_target(reach), learner)
        return
    if not undo:
        confirm(f"Evict learner {learner} from the run at {reach.servers[0]}?", "evict", yes=yes)
    evict(_target(reach), learner, "" if undo else reason or "by an operator", tokens)


def token_command(
    name: Annotated[str, typer.Argument(help="Name of the operator, for the audit log.")],
    file: Annotated[
        Path,
        typer.Option(
            help="Token file. Give this file to the core as --operator-tokens.",
            envvar="ATOLL_CORE_OPERATOR_TOKENS",  # the core's variable: ATOLL_TOKEN_FILE holds one token
        ),
    ] = Path("operator-tokens"),
) -> None:
    """Create an operator's token, which replaces an earlier token with this name. Start the core with --operator-tokens FILE."""
    from atoll_server.access.tokens import new

    print(new(file, name))


@takes(reach=core, form=output)
def checkpoint_list(
    reach: Reach,
    form: Format,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Read the run in this directory instead of calling a core.",
            envvar="ATOLL_CHECKPOINT_LIST_DIR",
        ),
    ] = None,
) -> None:
    """List the checkpoints on a core's disk. You can restore any of them."""
    if directory is not None:
        need("checkpoint list --dir", "server", *KEEPING)
        from atoll_server.cli.run_directory import list_from_directory

        list_from_directory(directory, form)
        return
    from atoll_server.cli.operator_client import list_checkpoints

    list_checkpoints(_target(reach), form)


def checkpoint_restore(
    checkpoint: Annotated[
        int, typer.Argument(metavar="ID", help="Number of the checkpoint (see atoll checkpoint list).", min=1)
    ],
    directory: Annotated[
        Path,
        typer.Option("--dir", help="Directory of the run. Stop the core first.", envvar="ATOLL_CHECKPOINT_RESTORE_DIR"),
    ],
) -> None:
    """Restore a run to an older checkpoint. A new generation begins there, and learners continue from it.

    A core keeps the newest snapshots (--keep-snapshots, default 3) and takes one when it stops. After a restore, the
    old generation's snapshots are kept until the new generation has two. Until then, you can undo the restore.
    """
    need("checkpoint restore", "server", *KEEPING)
    from atoll_server.cli.run_directory import restore_checkpoint
    from atoll_server.storage import crash_points

    if wanted := os.environ.get("ATOLL_CRASH_AT"):  # tests only
        crash_points.watch(crash_points.kill_at(wanted))
    restore_checkpoint(directory, checkpoint)


@takes(reach=core)
def checkpoint_take(reach: Reach) -> None:
    """Take a checkpoint now and wait until it is durable."""
    from atoll_server.cli.operator_client import take_checkpoint

    take_checkpoint(_target(reach))


@takes(reach=core)
def checkpoint_export(
    out: Annotated[
        Path, typer.Argument(help="Safetensors file to write; with --max-file-size or --adapter, the folder to write.")
    ],
    reach: Reach,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", help="Read this directory instead of calling a core.", envvar="ATOLL_CHECKPOINT_EXPORT_DIR"
        ),
    ] = None,
    initial: Annotated[bool, typer.Option("--initial", help="Write the initial parameters (version 0).")] = False,
    max_file_size: Annotated[
        int | None,
        typer.Option(
            parser=size,
            help="Write a folder with an index and files of at most this size, such as 5GiB. A larger tensor gets its own file.",
            metavar="<bytes>",
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Write a folder that PEFT loads, with a copy of this adapter_config.json.")
    ] = None,
) -> None:
    """Write the published model as a safetensors file or as a folder of such files.

    With --max-file-size, the folder has the format of Hugging Face's libraries: files and an index. An earlier export
    at the same path is overwritten.
    """
    from atoll_server.cli.export_target import check_options
    from atoll_server.cli.operator_client import export_checkpoint

    check_options(max_file_size, adapter)
    if directory is not None:
        need("checkpoint export --dir", "server", *KEEPING)
        from atoll_server.cli.run_directory import export_from_directory

        export_from_directory(directory, out, initial=initial, max_file_bytes=max_file_size, adapter=adapter)
    else:
        export_checkpoint(_target(reach), out, initial=initial, max_file_bytes=max_file_size, adapter=adapter)


@takes(form=output)
def replay_command(
    form: Format,
    directory: Annotated[Path, typer.Argument(help="Directory of a core that was started with --record.")],
    changes: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="Replay with another outer_lr, outer_momentum, outer_warm_up, staleness_exponent or codec. You may repeat this option.",
            metavar="NAME=VALUE",
            envvar="ATOLL_REPLAY_SET",
        ),
    ] = [],  # noqa: B006 - typer copies it
    out: Annotated[
        Path | None, typer.Option(help="Write the resulting model to this file, as checkpoint export does.")
    ] = None,
    generation: Annotated[
        int | None,
        typer.Option(
            help="Generation to replay, if the run was restored to a checkpoint. Default: the current one.", min=1
        ),
    ] = None,
) -> None:
    """Repeat every merge of a recorded run from its ledger, either byte for byte or with other outer settings."""
    need("replay", "server", *KEEPING)
    from rich.progress import Progress

    from atoll_server.cli.replay import replay, show_replayed
    from atoll_server.cli.run_directory import check_whole_model, run_id, show_export, write_model

    if out is not None:
        check_whole_model(directory)

    shown = console()
    with Progress(console=shown, transient=True, disable=form.is_json or not shown.is_terminal) as progress:
        task = progress.add_task("merges")
        done = replay(
            directory, changes, lambda count, total: progress.update(task, completed=count, total=total), generation
        )
    if out is not None:
        write_model(out, done.layout, done.initial, done.states, None if changes else run_id(directory, generation))
    show_replayed(done, changes, out, form)
    if out is not None and not form.is_json:
        show_export(out)
    if not changes and not done.identical:
        raise typer.Exit(1)


def reshard_command(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIRECTORY...",
            help="Directory of the core. With several shards: the directories of all cores, or the folder that holds them.",
        ),
    ],
    shards: Annotated[int, typer.Option(help="New number of shards, at most one per fragment.", min=1)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write the new directories to. Default: DIRECTORY-N-shards, next to the first directory."
        ),
    ] = None,
    registrar_only: Annotated[
        bool, typer.Option("--registrar-only", help="Give the registrar a directory without fragments.")
    ] = False,
) -> None:
    """Divide a stopped run among a different number of shards. No acknowledged work is lost, and no parameter changes.

    The command needs memory for one old shard, and disk space for the new directories: 12 bytes per parameter, the
    initial parameters, and pending contributions. It compares the new directories with the old ones. The old
    directories are not changed and keep their older checkpoints, but no core starts from them.
    """
    need("reshard", "server", *KEEPING)
    from atoll_server.cli.reshard import reshard_directories
    from atoll_server.storage import crash_points

    if wanted := os.environ.get("ATOLL_CRASH_AT"):  # tests only
        crash_points.watch(crash_points.kill_at(wanted))
    reshard_directories(directories, shards, out, alone=registrar_only)


def _target(reach: Reach) -> Any:  # noqa: ANN401
    from atoll_wire.security.transport import TransportSecurity

    from atoll_server.cli.operator_client import OperatorTarget

    return OperatorTarget(reach.servers[0], TransportSecurity(reach.tls, reach.plaintext), reach.token)
