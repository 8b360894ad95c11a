"""Subcommands of `atoll` for training: learner, pull, doctor, demo, chaos. They import torch only when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from atoll_wire.errors import need
from atoll_wire.process import lazy_commands

REACH = "Connection to a core"
TRAINING = ("torch", "psutil", "numba", "zstandard")


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands to `atoll`."""
    lazy_commands.add(app, "learner", "Train the reference model as one learner of a run.", _learner)
    app.command("pull")(pull_command)
    text = "Check the connection to a core, a core's disk, and a model before training, and print fixes. The exit status is 1 if a check fails."
    lazy_commands.add(app, "doctor", text, _doctor)
    text = "Train with a core and learners on this machine, and kill one of each during training."
    lazy_commands.add(app, "demo", text, _demo)
    text = "Kill, pause and restart processes of a local deployment, and report the lost work."
    lazy_commands.add(app, "chaos", text, _chaos)


def _learner() -> lazy_commands.Command:
    from atoll_wire.process.settings import Logs, command

    from atoll.reference.settings import JoinSettings, TrainSettings

    def learner(settings: TrainSettings, joining: JoinSettings, logs: Logs) -> None:
        need("learner", "learner", *TRAINING)
        from atoll.agent.join_request import own_name
        from atoll.reference.train import train

        logs.begin()
        train(settings, joining.model_copy(update={"name": joining.name or own_name(joining.region)}))

    return command(learner, TrainSettings, JoinSettings, Logs)


def pull_command(
    out: Annotated[Path, typer.Argument(help="Safetensors file to write.")],
    server: Annotated[
        list[str],
        typer.Option(
            help="Address of a core or a front. You may repeat this option.", metavar="HOST:PORT", rich_help_panel=REACH
        ),
    ] = ["127.0.0.1:7070"],  # noqa: B006 - typer copies it
    follow: Annotated[
        bool, typer.Option("--follow", help="Replace the file whenever the model has changed, until Ctrl-C.")
    ] = False,
    every_s: Annotated[
        float, typer.Option(help="With --follow: shortest time between two files, in seconds.", min=0.0, max=1e6)
    ] = 60.0,
    connect_timeout_s: Annotated[
        float,
        typer.Option(help="Longest wait for the first model, in seconds.", min=0.0, max=1e6, rich_help_panel=REACH),
    ] = 600.0,
    tls: Annotated[
        Path | None,
        typer.Option(
            "--tls",
            help="Directory of certificates (see atoll certs).",
            envvar="ATOLL_TLS",
            rich_help_panel=REACH,
        ),
    ] = None,
    token: Annotated[
        str,
        typer.Option(
            help="Operator's token (see atoll token).",
            envvar="ATOLL_TOKEN",
            rich_help_panel=REACH,
        ),
    ] = "",
    insecure_plaintext: Annotated[
        bool,
        typer.Option(
            "--insecure-plaintext", help="Allow an address beyond loopback without TLS.", rich_help_panel=REACH
        ),
    ] = False,
) -> None:
    """Write the published model as a safetensors file, with the same bytes as `atoll checkpoint export`.

    Through a front, each update crosses the WAN once for all readers of the region.
    """
    need("pull", "numerics", "numba", "zstandard")
    from atoll_wire.process.clock import SYSTEM
    from atoll_wire.security.transport import TransportSecurity

    from atoll.follower.follow_session import Source
    from atoll.follower.pull import pull

    source = Source(server, connect_timeout_s, TransportSecurity(tls, insecure_plaintext), token)
    pull(out, source, SYSTEM, every_s if follow else None, lambda line: print(line, flush=True))


def _doctor() -> lazy_commands.Command:
    from atoll_wire.process.settings import command

    from atoll.doctor import (
        DoctorSettings,
        LearnerToCheck,
        check_connection,
        check_disk,
        of_model,
        print_findings,
    )

    def doctor(settings: DoctorSettings) -> None:
        if not settings.servers and settings.directory is None:
            raise typer.BadParameter(
                "nothing to check: give the address of a core or front (--server), or a core's directory (--dir)",
                param_hint="--server",
            )
        model: dict[str, Any] = {}
        if settings.size is not None:
            need("doctor --size", "learner", *TRAINING)
            from atoll.reference.model import SIZES, Transformer
            from atoll.reference.train import optimizer_for

            reference = Transformer(SIZES[settings.size])
            model = of_model(reference, optimizer_for(reference, 1e-3))
        bad = print_findings(check_disk(settings.directory)) if settings.directory is not None else False
        for address in settings.servers:
            bad |= print_findings(check_connection(LearnerToCheck(address, settings.security, settings.name, **model)))
        raise typer.Exit(1 if bad else 0)

    return command(doctor, DoctorSettings)


def _demo() -> lazy_commands.Command:
    from atoll_wire.process.settings import command

    from atoll.demo.settings import DemoSettings

    def demo(settings: DemoSettings) -> None:
        need("demo", "learner", *TRAINING)
        from atoll.demo.run import run_demo

        run_demo(settings)

    return command(demo, DemoSettings)


def _chaos() -> lazy_commands.Command:
    from atoll_wire.process.settings import command

    from atoll.chaos.settings import ChaosSettings

    def chaos(settings: ChaosSettings) -> None:
        need("chaos", "learner", *TRAINING)
        from atoll.chaos.run import run_chaos

        run_chaos(settings)

    return command(chaos, ChaosSettings)
