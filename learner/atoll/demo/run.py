"""Runs the demo: starts a core and learners of unequal speed, kills and restarts processes, and prints a summary."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.cli.output import Figures
from atoll_wire.connections.calls import open_stream
from rich.console import Console

from atoll.demo.cores import Cores, LocalFront
from atoll.demo.display import Progress, summary_table
from atoll.demo.kills import Kills
from atoll.demo.processes import ATOLL, Child, Children, DemoError, children
from atoll.demo.regions import Regions
from atoll.demo.settings import BATCH, CONTEXT, DemoSettings, region_name
from atoll.reference.settings import TrainSettings

SLOW_DOWN = (1.0, 1.15, 1.35)  # slow-down factors, which learners use in rotation, so that their speeds differ
FRAGMENTS = 8  # a model of 1M parameters is too small for 24 fragments
FIRST, LAST = "first.safetensors", "last.safetensors"
POLL_S = 0.5
ANSWER_S = 20.0


def run_demo(settings: DemoSettings, out: Figures) -> None:
    """Runs the demo and prints the summary. Raises DemoError if a process fails. Ctrl-C ends every child.

    out: where the summary goes. If the summary is printed as JSON, the progress goes to standard error.
    """
    settings.check()
    out.check()
    if settings.data is not None and not os.access(settings.data, os.R_OK):
        raise DemoError(f"--data {settings.data} cannot be read: give a readable text file or folder")
    console, began = Console(stderr=out.form.is_json), time.monotonic()
    with tempfile.TemporaryDirectory() if settings.keep is None else nullcontext(settings.keep) as place:
        directory = Path(place)
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "run").exists():
            raise DemoError(f"--keep {directory} already contains a run: give a new directory")
        with children(directory) as group, Progress(console, settings.total_tokens) as progress:
            status, kills, regions = _train(settings, directory, group, progress)
        seconds = time.monotonic() - began
        summary = _summary(settings, directory, status, kills, seconds) | ({"regions": regions} if regions else {})
        solo = _alone(settings, status, console) if settings.solo else None
        if solo is not None:
            summary["solo_validation_loss"] = solo
    out.show(summary, lambda: summary_table(summary, solo))


def _train(
    settings: DemoSettings, directory: Path, group: Children, progress: Progress
) -> tuple[pb.StatusReply, dict[str, int], dict[str, dict[str, Any]]]:
    """Trains until all learners have left. Returns the last status, the numbers of kills, and figures by region."""
    options = ["--fragments", str(FRAGMENTS), "--snapshot-every-s", "30", "--total-tokens", str(settings.total_tokens)]
    options += ["--compression", "always"]  # its bytes are those of a WAN, although all processes share one machine
    options += ["--record"] if settings.keep is not None else []
    cores = Cores(group, directory, settings.shards, options)
    what = f"the registrar of {settings.shards} shards" if settings.sharded else "the core"
    progress.note(f"{what} listens on {cores.address}; starting {settings.count} learners")
    if find_spec("fastapi") is not None:  # the dashboard is an optional extra
        _, url = group.start_dashboard("127.0.0.1:0", cores.address)
        progress.note(f"dashboard: {url}")
    regions = Regions(group, directory, cores.address, [region_name(n) for n in range(settings.regions)])
    front = LocalFront(group, cores.address) if settings.sharded else None
    servers = [region.address for region in regions.all] or [cores.address if front is None else front.address]
    commands = [_learner(settings, n, servers[n % len(servers)]) for n in range(settings.count)]
    learners = [group.start(settings.name(n), command) for n, command in enumerate(commands)]
    kills = Kills(settings, group, progress, cores, regions, front, learners)
    with grpc.insecure_channel(cores.address, options=[("grpc.max_reconnect_backoff_ms", 1000)]) as channel:
        stub = rpc.OperatorStub(channel)
        while any(learner.process.poll() is None for learner in learners):
            time.sleep(POLL_S)
            fronts = [child for region in regions.all for child in (region.front, region.relay)]
            _check(learners, *cores.all, *fronts, *([] if front is None else [front.child]))
            status = _status(stub)
            progress.show(status)
            kills.look(status.tokens_trained / settings.total_tokens)
        _check(learners, *cores.all)
        status = _settled(stub)
        progress.note("all learners have left")
        _export(stub, directory / FIRST, initial=True)
        _export(stub, directory / LAST, initial=False)
    figures = regions.figures()
    cores.stop()
    return status, kills.counts(), figures


def _export(stub: rpc.OperatorStub, path: Path, *, initial: bool) -> None:
    request = pb.ExportCheckpointRequest(initial=initial)
    with open_stream("ExportCheckpoint", stub.ExportCheckpoint(request)) as call, path.open("wb") as file:
        file.writelines(reply.chunk for reply in call)


def _learner(settings: DemoSettings, number: int, address: str) -> list[str]:
    data = ["--data", str(settings.data)] if settings.data is not None else []
    slow_down = SLOW_DOWN[number % len(SLOW_DOWN)]
    return [
        *(*ATOLL, "learner", "--server", address, "--name", settings.name(number), "--region", settings.region(number)),
        *("--size", "tiny", "--batch", str(BATCH), "--seed", str(settings.seed)),
        *("--slow-down", str(slow_down), "--device", "cpu", *data),
    ]


def _check(learners: list[Child], *servers: Child) -> None:
    """Raises DemoError if a child ended unexpectedly."""
    for child in (*learners, *servers):
        if child.process.poll() not in {None, 0} or (child in servers and child.process.poll() is not None):
            raise DemoError(f"{child.name} exited with status {child.process.returncode}: {child.tail()}")


def _status(stub: rpc.OperatorStub) -> pb.StatusReply:
    """Returns the core's status. Retries until the core answers, because a restart breaks connections. Raises DemoError
    after ANSWER_S seconds."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            status: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=ANSWER_S, wait_for_ready=True)
            return status
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise DemoError(
                    f"the core does not answer ({error.details()}): use --keep DIR, and read its log there"
                ) from error


def _settled(stub: rpc.OperatorStub) -> pb.StatusReply:
    """Returns the status once no contribution is pending, or after 30 seconds. The core merges open rounds when all
    learners have left."""
    deadline = time.monotonic() + 30.0
    while True:
        status = _status(stub)
        if status.contributions.pending == 0 or time.monotonic() > deadline:
            return status
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------------- figures


def _summary(
    settings: DemoSettings, directory: Path, status: pb.StatusReply, kills: dict[str, int], seconds: float
) -> dict[str, Any]:
    counts, wire = status.contributions, status.wire
    return {
        "learners": settings.count,
        "parameters": status.parameters,
        "merges": status.merges,
        "tokens_trained": status.tokens_trained,
        "tokens_merged": round(status.tokens_merged),
        "validation_loss": {
            "first": _evaluate(settings, directory / FIRST),
            "last": _evaluate(settings, directory / LAST),
        },
        "goodput": status.goodput.ratio,
        "goodput_lost_s": dict(status.goodput.lost_s),
        "learner_blocked_fraction": max(each.blocked_fraction for each in status.learners),
        "wire_bits_per_parameter": {
            "up": 8 * wire.up / max(1, wire.up_parameters),
            "down": 8 * wire.down / max(1, wire.down_parameters),
        },
        "wire_bytes": {"up": wire.up, "down": wire.down},
        "whole_bytes": wire.whole,
        "kills": kills,
        "contributions": {
            "accepted": counts.accepted,
            "merged": counts.merged,
            "refused": counts.refused,
            "pending": counts.pending,
        },
        "seconds": seconds,
    }


def _evaluate(settings: DemoSettings, path: Path) -> float:
    """Returns the validation loss of an exported checkpoint in the plain model, without Atoll's code."""
    from atoll.reference.train import loss_of_file  # noqa: PLC0415 - loads torch only after the children have ended

    return loss_of_file(path, "tiny", settings.data)


def _alone(settings: DemoSettings, status: pb.StatusReply, console: Console) -> float:
    """Returns the validation loss of one process that trains on the busiest learner's number of tokens without a
    core."""
    from atoll.reference import data  # noqa: PLC0415 - see above
    from atoll.reference.train import train_alone, validation_loss  # noqa: PLC0415 - see above

    busiest = max(status.learners, key=lambda each: each.tokens)
    console.print(f"training without Atoll on {busiest.tokens:,} tokens, as many as {busiest.learner} trained on ...")
    alone = TrainSettings(batch=BATCH, data=settings.data, seed=settings.seed, device="cpu", threads=0)

    def tell(step: int, loss: float) -> None:
        if step % 200 == 0:
            console.print(f"  without Atoll: step {step}, loss {loss:.3f}", highlight=False)

    model = train_alone(alone, busiest.learner, busiest.tokens, tell)
    return validation_loss(model, data.load(settings.data, CONTEXT))
