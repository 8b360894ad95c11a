"""Subcommands of `atoll` for those who train: learner, demo. torch is loaded only when one of them runs."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Annotated, Literal

import typer
from atoll_wire.errors import UserError

MODEL = "Model and text"
JOINING = "Joining"


class MissingTorch(UserError):  # noqa: N818 - says what is missing
    """A subcommand needs torch and it is not installed."""


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands."""
    app.command()(learner)
    app.command()(demo)


def _need_torch(subcommand: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingTorch(f"atoll {subcommand} needs torch: pip install 'atoll[learner]'")


def _finite(value: float) -> float:
    """Infinity passes a lower bound, and nothing can wait for so long."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value}: give a finite number")
    return value


def learner(
    name: Annotated[str, typer.Option(help="Unique among the run's learners.", rich_help_panel=JOINING)],
    server: Annotated[list[str], typer.Option(help="A core's address; may be given several times.", metavar="HOST:PORT", rich_help_panel=JOINING)] = ["127.0.0.1:7070"],  # noqa: B006 - typer copies it
    region: Annotated[str, typer.Option(help="Where this learner is, for people.", rich_help_panel=JOINING)] = "",
    adoption: Annotated[str, typer.Option(help="rebase keeps outstanding work, overwrite drops it.", rich_help_panel=JOINING)] = "rebase",
    connect_timeout_s: Annotated[float, typer.Option(help="How long to wait for the core at the start.", min=0.0, callback=_finite, rich_help_panel=JOINING)] = 600.0,
    drain_s: Annotated[float, typer.Option(help="How long to wait for acknowledgements at the end.", min=0.0, callback=_finite, rich_help_panel=JOINING)] = 30.0,
    metrics_port: Annotated[int | None, typer.Option(help="Serve Prometheus metrics on this port of 127.0.0.1.", min=1, max=65535)] = None,
    size: Annotated[str, typer.Option(help="tiny (1M), 25m or 124m parameters.", rich_help_panel=MODEL)] = "tiny",
    data: Annotated[Path | None, typer.Option(help="A text file or a folder of them; default: the Python standard library's sources.", rich_help_panel=MODEL)] = None,
    batch: Annotated[int, typer.Option(help="Windows in a step.", min=1, rich_help_panel=MODEL)] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's rate.", min=0.0, callback=_finite, rich_help_panel=MODEL)] = 3e-3,
    total_tokens: Annotated[int, typer.Option(help="Of the whole run, all learners together; the schedule follows it.", min=1, rich_help_panel=MODEL)] = 4_000_000,
    max_steps: Annotated[int | None, typer.Option(help="Leave after so many steps of this learner.", min=1, rich_help_panel=MODEL)] = None,
    seed: Annotated[int, typer.Option(help="Of the first parameters and the text's order.", min=0, rich_help_panel=MODEL)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads of torch; 0: its own choice.", min=0)] = 1,
    slow_down: Annotated[float, typer.Option(help="Pause after each step, to run at 1/N of the speed.", min=1.0, callback=_finite)] = 1.0,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object a line.")] = False,
) -> None:  # fmt: skip
    """Train the reference model as one learner of a run."""
    _need_torch("learner")
    from atoll_wire.logs import configure

    from atoll.reference.model import SIZES
    from atoll.reference.train import Joining, TrainSettings, train

    if size not in SIZES:
        raise typer.BadParameter(f"{size}: use one of {', '.join(SIZES)}", param_hint="--size")
    if adoption not in {"rebase", "overwrite"}:
        raise typer.BadParameter(f"{adoption}: use rebase or overwrite", param_hint="--adoption")
    configure("info", json=log_json)
    kept: Literal["rebase", "overwrite"] = "rebase" if adoption == "rebase" else "overwrite"
    train(
        TrainSettings(size, data, batch, learning_rate, total_tokens, max_steps, seed, device, threads, slow_down),
        Joining(tuple(server), name, region, kept, connect_timeout_s, drain_s, metrics_port),
    )


def demo(
    learners: Annotated[int, typer.Option(help="Learner processes.", min=1, max=64)] = 3,
    steps: Annotated[int, typer.Option(help="Inner steps of all learners together.", min=30)] = 2700,
    kills: Annotated[bool, typer.Option("--kills/--no-kills", help="Kill a learner, and later the core, on the way.")] = True,
    solo: Annotated[bool, typer.Option("--solo", help="Afterwards train the busiest learner's tokens alone, and compare.")] = False,
    seed: Annotated[int, typer.Option(help="Of the first parameters and the text's order.", min=0)] = 0,
    data: Annotated[Path | None, typer.Option(help="A text file or a folder of them; default: the Python standard library's sources.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the summary there.", envvar="ATOLL_DEMO_JSON")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the run's directory and the processes' logs there.")] = None,
) -> None:  # fmt: skip
    """One core and some learners on this machine, with a SIGKILL of each kind on the way."""
    _need_torch("demo")
    from atoll.demo.run import DemoSettings, run_demo

    run_demo(DemoSettings(learners, steps, kills, solo, seed, data, json_path, keep))
