"""Subcommands of `atoll` for those who train: learner, doctor, demo, chaos. torch is loaded only when one of them runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from atoll_wire.errors import need

MODEL = "Model and text"
JOINING = "Joining"
TRAINING = ("torch", "psutil", "numba", "zstandard")


def register(app: typer.Typer) -> None:
    """Adds this package's subcommands."""
    app.command()(learner)
    app.command()(doctor)
    app.command()(demo)
    app.command()(chaos)


def _finite(value: float) -> float:
    """Infinity passes a lower bound, and nothing can wait for so long."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value}: give a finite number")
    return value


def learner(
    server: Annotated[list[str], typer.Option(help="A core's address; may be given several times.", metavar="HOST:PORT", rich_help_panel=JOINING)] = ["127.0.0.1:7070"],  # noqa: B006 - typer copies it
    name: Annotated[str, typer.Option(help="Unique among the run's learners [REGION.HOSTNAME].", rich_help_panel=JOINING)] = "",
    region: Annotated[str, typer.Option(help="Where this learner is, for people.", rich_help_panel=JOINING)] = "",
    adoption: Annotated[str, typer.Option(help="rebase keeps outstanding work, overwrite drops it.", rich_help_panel=JOINING)] = "rebase",
    connect_timeout_s: Annotated[float, typer.Option(help="How long to wait for the core at the start.", min=0.0, callback=_finite, rich_help_panel=JOINING)] = 600.0,
    drain_s: Annotated[float, typer.Option(help="How long to wait for acknowledgements at the end.", min=0.0, callback=_finite, rich_help_panel=JOINING)] = 30.0,
    metrics_listen: Annotated[str | None, typer.Option(help="Serve Prometheus metrics there.", metavar="HOST:PORT")] = None,
    metrics_plaintext: Annotated[bool, typer.Option("--metrics-plaintext", help="Allow metrics beyond loopback: they are plain HTTP.")] = False,
    tls: Annotated[Path | None, typer.Option("--tls", help="Directory of certificates, see atoll certs.", envvar="ATOLL_TLS", rich_help_panel=JOINING)] = None,
    insecure_plaintext: Annotated[bool, typer.Option("--insecure-plaintext", help="Allow an address beyond loopback without TLS.", rich_help_panel=JOINING)] = False,
    size: Annotated[str, typer.Option(help="tiny (1M), 25m or 124m parameters.", rich_help_panel=MODEL)] = "tiny",
    data: Annotated[Path | None, typer.Option(help="A text file or a folder of them; default: the Python standard library's sources.", rich_help_panel=MODEL)] = None,
    batch: Annotated[int, typer.Option(help="Windows in a step.", min=1, rich_help_panel=MODEL)] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's rate.", min=0.0, callback=_finite, rich_help_panel=MODEL)] = 3e-3,
    max_steps: Annotated[int | None, typer.Option(help="Leave after so many steps of this learner.", min=1, rich_help_panel=MODEL)] = None,
    seed: Annotated[int, typer.Option(help="Of the first parameters and the text's order.", min=0, rich_help_panel=MODEL)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads of torch; 0: its own choice.", min=0)] = 1,
    slow_down: Annotated[float, typer.Option(help="Pause after each step, to run at 1/N of the speed.", min=1.0, callback=_finite)] = 1.0,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object a line.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:  # fmt: skip
    """Train the reference model as one learner of a run."""
    need("learner", "learner", *TRAINING)
    from atoll_wire.logs import configure

    from atoll.agent.joining import own_name
    from atoll.reference.model import SIZES
    from atoll.reference.train import Joining, TrainSettings, train

    if size not in SIZES:
        raise typer.BadParameter(f"{size}: use one of {', '.join(SIZES)}", param_hint="--size")
    if adoption not in {"rebase", "overwrite"}:
        raise typer.BadParameter(f"{adoption}: use rebase or overwrite", param_hint="--adoption")
    configure(log_level, json=log_json)
    kept: Literal["rebase", "overwrite"] = "rebase" if adoption == "rebase" else "overwrite"
    train(
        TrainSettings(size, data, batch, learning_rate, max_steps, seed, device, threads, slow_down),
        Joining(
            tuple(server),
            name or own_name(region),
            region,
            kept,
            connect_timeout_s,
            drain_s,
            metrics_listen,
            metrics_plaintext,
            tls,
            insecure_plaintext,
        ),
    )


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


def demo(
    learners: Annotated[int | None, typer.Option(help="Learner processes [3, or two in each region].", min=1, max=64)] = None,
    regions: Annotated[int, typer.Option(help="Regions with a front each, behind a link of 100 Mbit/s and 40 ms; 0: learners call the core.", min=0, max=6)] = 0,
    steps: Annotated[int, typer.Option(help="Inner steps of all learners together.", min=30)] = 2700,
    kills: Annotated[bool, typer.Option("--kills/--no-kills", help="Kill a learner, and later the core, on the way.")] = True,
    solo: Annotated[bool, typer.Option("--solo", help="Afterwards train the busiest learner's tokens alone, and compare.")] = False,
    seed: Annotated[int, typer.Option(help="Of the first parameters and the text's order.", min=0)] = 0,
    data: Annotated[Path | None, typer.Option(help="A text file or a folder of them; default: the Python standard library's sources.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the summary there.", envvar="ATOLL_DEMO_JSON")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the run there, recorded for atoll replay PATH/run, and the processes' logs.")] = None,
) -> None:  # fmt: skip
    """One core and some learners on this machine, with a SIGKILL of each kind on the way."""
    need("demo", "learner", *TRAINING)
    from atoll.demo.run import DemoSettings, run_demo

    run_demo(DemoSettings(learners or 2 * regions or 3, regions, steps, kills, solo, seed, data, json_path, keep))


def chaos(
    learners: Annotated[int, typer.Option(help="Learner processes.", min=1, max=64)] = 4,
    seconds: Annotated[float, typer.Option(help="How long, from when all learners train.", min=1.0, callback=_finite)] = 300.0,
    mtbf_s: Annotated[float, typer.Option(help="Mean seconds between failures of any learner; 0: none.", min=0.0, callback=_finite)] = 60.0,
    core_mtbf_s: Annotated[float, typer.Option(help="Mean seconds between failures of the core; 0: none.", min=0.0, callback=_finite)] = 0.0,
    pauses: Annotated[float, typer.Option(help="Share of learner failures that are pauses (SIGSTOP).", min=0.0, max=1.0)] = 0.0,
    restart_after_s: Annotated[float, typer.Option(help="From a kill to the start of the next process.", min=0.0, callback=_finite)] = 0.0,
    schedule: Annotated[str | None, typer.Option(help="Instead of dice: 12:kill:eu-west,30:pause:us-east:5,40:kill:core")] = None,
    seed: Annotated[int, typer.Option(help="Of the dice, the first parameters and the text's order.", min=0)] = 0,
    procfile: Annotated[Path | None, typer.Option(help="A deployment of your own: `name: command` a line, the core's name is core.", rich_help_panel="What runs")] = None,
    server: Annotated[str, typer.Option(help="Where the core of --procfile answers.", metavar="HOST:PORT", rich_help_panel="What runs")] = "127.0.0.1:7070",
    size: Annotated[str, typer.Option(help="tiny (1M), 25m or 124m parameters.", rich_help_panel="What runs")] = "tiny",
    batch: Annotated[int, typer.Option(help="Windows in a step.", min=1, rich_help_panel="What runs")] = 8,
    total_tokens: Annotated[int, typer.Option(help="Of the schedule of the learning rate; the run ends there at the latest.", min=1, rich_help_panel="What runs")] = 20_000_000,
    core_option: Annotated[list[str], typer.Option(help="Passed to the core, such as --core-option=--fragments=8.", rich_help_panel="What runs")] = ["--fragments=8", "--snapshot-every-s=30"],  # noqa: B006 - typer copies it
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the summary there.", envvar="ATOLL_CHAOS_JSON")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the run's directory and the processes' logs there.")] = None,
) -> None:  # fmt: skip
    """Kill, pause and restart processes of a local deployment, and see what it costs."""
    need("chaos", "learner", *TRAINING)
    from atoll.chaos.run import ChaosSettings, run_chaos

    run_chaos(
        ChaosSettings(
            learners, seconds, mtbf_s, core_mtbf_s, pauses, restart_after_s, schedule, seed, size, batch, total_tokens,
            tuple(core_option), procfile, server, json_path, keep,
        )
    )  # fmt: skip
