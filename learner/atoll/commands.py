"""Subcommands of `atoll` for training: learner, pull, doctor, demo, chaos. They import torch only when they run."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from atoll_wire.cli.option_groups import Reach, cores, figures, output, takes
from atoll_wire.cli.output import Figures, Format
from atoll_wire.errors import need
from atoll_wire.process import lazy_commands

TRAINING = ("torch", "psutil", "numba", "zstandard")


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands to `atoll`."""
    lazy_commands.add(app, "learner", "Train the reference model as one learner of a run.", _learner)
    app.command("pull")(pull_command)
    text = (
        "Check the connection to a core, a core's disk and a model before training. "
        "The exit status is 1 if a check fails."
    )
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
        from atoll.reference.refusal import handle_refusal
        from atoll.reference.train import train

        logs.begin()
        faulthandler.register(signal.SIGUSR1)  # writes the stacks of all threads to stderr
        named = joining.model_copy(update={"name": joining.name or own_name(joining.region)})
        handle_refusal(lambda: train(settings, named), wait=joining.if_refused == "wait")

    return command(learner, TrainSettings, JoinSettings, Logs)


@takes(reach=cores)
def pull_command(
    out: Annotated[Path, typer.Argument(help="Safetensors file to write.")],
    reach: Reach,
    follow: Annotated[
        bool, typer.Option("--follow", help="Replace the file whenever the model has changed, until Ctrl-C.")
    ] = False,
    every_s: Annotated[
        float, typer.Option(help="With --follow: shortest time between two writes, in seconds.", min=0.0, max=1e6)
    ] = 60.0,
    connect_timeout_s: Annotated[
        float,
        typer.Option(help="Longest wait for the first model, in seconds.", min=0.0, max=1e6),
    ] = 600.0,
) -> None:
    """Write the published model as a safetensors file, with the same bytes as `atoll checkpoint export`.

    Through a front, each update crosses the WAN once for all readers of the region.
    """
    need("pull", "numerics", "numba", "zstandard")
    from atoll_wire.process.clock import SYSTEM
    from atoll_wire.security.transport import TransportSecurity

    from atoll.follower.follow_session import Source
    from atoll.follower.pull import pull

    source = Source(reach.servers, connect_timeout_s, TransportSecurity(reach.tls, reach.plaintext), reach.token)
    pull(out, source, SYSTEM, every_s if follow else None, lambda line: print(line, flush=True))


def _doctor() -> lazy_commands.Command:
    from atoll_wire.process.settings import command

    from atoll.doctor import DoctorSettings, of_model, report

    def doctor(settings: DoctorSettings, form: Format) -> None:
        model: dict[str, Any] = {}
        if settings.size is not None:
            need("doctor --size", "learner", *TRAINING)
            from atoll.reference.model import SIZES, Transformer
            from atoll.reference.train import optimizer_for

            reference = Transformer(SIZES[settings.size])
            model = of_model(reference, optimizer_for(reference, 1e-3))
        raise typer.Exit(report(settings, form, **model))

    return command(doctor, DoctorSettings, form=output)


def _demo() -> lazy_commands.Command:
    from atoll_wire.process.settings import command

    from atoll.demo.settings import DemoSettings

    def demo(settings: DemoSettings, out: Figures) -> None:
        need("demo", "learner", *TRAINING)
        from atoll.demo.run import run_demo

        run_demo(settings, out)

    return command(demo, DemoSettings, out=figures)


def _chaos() -> lazy_commands.Command:
    from atoll_wire.process.settings import command

    from atoll.chaos.settings import ChaosSettings

    def chaos(settings: ChaosSettings, out: Figures) -> None:
        need("chaos", "learner", *TRAINING)
        from atoll.chaos.run import run_chaos

        run_chaos(settings, out)

    return command(chaos, ChaosSettings, out=figures)
