"""Subcommands of `atoll` for those who train: learner, doctor, demo, chaos. torch is loaded only when one of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from atoll_wire import lazy_commands
from atoll_wire.errors import need

TRAINING = ("torch", "psutil", "numba", "zstandard")


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands."""
    lazy_commands.add(app, "learner", "Train the reference model as one learner of a run.", _learner)
    app.command()(doctor)
    text = "One core and some learners on this machine, with a SIGKILL of each kind on the way."
    lazy_commands.add(app, "demo", text, _demo)
    text = "Kill, pause and restart processes of a local deployment, and see what it costs."
    lazy_commands.add(app, "chaos", text, _chaos)


def _learner() -> lazy_commands.Command:
    from atoll_wire.settings import Logs, command

    from atoll.reference.settings import Joining, TrainSettings

    def learner(settings: TrainSettings, joining: Joining, logs: Logs) -> None:
        need("learner", "learner", *TRAINING)
        from atoll.agent.joining import own_name
        from atoll.reference.train import train

        logs.begin()
        train(settings, joining.model_copy(update={"name": joining.name or own_name(joining.region)}))

    return command(learner, TrainSettings, Joining, Logs)


def doctor(
    server: Annotated[list[str], typer.Option(help="A core or front that would be called; may be given several times.", metavar="HOST:PORT")] = [],  # noqa: B006 - typer copies it
    directory: Annotated[Path | None, typer.Option("--dir", help="Where a core would keep a run.", envvar="ATOLL_DOCTOR_DIR")] = None,
    name: Annotated[str, typer.Option(help="As which a learner would join.")] = "",
    tls: Annotated[Path | None, typer.Option("--tls", help="Directory of certificates, see atoll certs.", envvar="ATOLL_TLS")] = None,
    insecure_plaintext: Annotated[bool, typer.Option("--insecure-plaintext", help="Allow an address beyond loopback without TLS.")] = False,
    size: Annotated[str | None, typer.Option(help="Compare the reference model, tiny, 25m or 124m, with the run's; your own: atoll.doctor.of_model.")] = None,
) -> None:  # fmt: skip
    """Find out before training what would go wrong on the way to a core, and what would help. Status 1: something bad."""
    from atoll_wire.access import Access

    from atoll.doctor import Patient, examine, examine_disk, of_model, tell

    if not server and directory is None:
        raise typer.BadParameter("give --server of a core or front, or --dir of a core", param_hint="--server")
    model: dict[str, Any] = {}
    if size is not None:
        need("doctor --size", "learner", *TRAINING)
        from atoll.reference.model import SIZES, Transformer
        from atoll.reference.train import optimizer_for

        if size not in SIZES:
            raise typer.BadParameter(f"{size}: use one of {', '.join(SIZES)}", param_hint="--size")
        reference = Transformer(SIZES[size])
        model = of_model(reference, optimizer_for(reference, 1e-3))
    bad = tell(examine_disk(directory)) if directory is not None else False
    for address in server:
        bad |= tell(examine(Patient(address, Access(tls, insecure_plaintext), name, **model)))
    raise typer.Exit(1 if bad else 0)


def _demo() -> lazy_commands.Command:
    from atoll_wire.settings import command

    from atoll.demo.settings import DemoSettings

    def demo(settings: DemoSettings) -> None:
        need("demo", "learner", *TRAINING)
        from atoll.demo.run import run_demo

        run_demo(settings)

    return command(demo, DemoSettings)


def _chaos() -> lazy_commands.Command:
    from atoll_wire.settings import command

    from atoll.chaos.settings import ChaosSettings

    def chaos(settings: ChaosSettings) -> None:
        need("chaos", "learner", *TRAINING)
        from atoll.chaos.run import run_chaos

        run_chaos(settings)

    return command(chaos, ChaosSettings)
