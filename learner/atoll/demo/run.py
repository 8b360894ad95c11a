"""Runs the demo: starts a core and learners of unequal speed, kills and restarts one of each, and prints a summary."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from atoll_wire.connections.calls import open_stream
from rich.console import Console

from atoll.demo.display import Progress, summary_table
from atoll.demo.processes import ATOLL, Child, Children, DemoError, children
from atoll.demo.regions import Regions
from atoll.demo.settings import BATCH, CONTEXT, DemoSettings, region_name
from atoll.reference.settings import TrainSettings

SLOW_DOWN = (1.0, 1.15, 1.35)  # slow-down factors, which learners use in rotation, so that their speeds differ
FRAGMENTS = 8  # a model of 1M parameters is too small for 24 fragments
KILL_FRONT_AT = 0.2  # fraction of the run's tokens, as in the next three constants
KILL_LEARNER_AT = 0.3
CUT_AT = 0.4
KILL_CORE_AT = 0.6
CUT_S = 10.0
POLL_S = 0.5
ANSWER_S = 20.0


@dataclass(slots=True)
class Killed:
    """Number of killed processes of each kind, and number of cut links, so far."""

    learner: int = 0
    core: int = 0
    front: int = 0
    cuts: int = 0


def run_demo(settings: DemoSettings) -> None:
    """Runs the demo and prints the summary. Raises DemoError if a process fails. Ctrl-C ends every child."""
    _check_writable(settings)
    console, began = Console(), time.monotonic()
    with tempfile.TemporaryDirectory() if settings.keep is None else nullcontext(settings.keep) as place:
        directory = Path(place)
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / "run").exists():
            raise DemoError(f"--keep {directory} already contains a run: give a new directory")
        with children(directory) as group, Progress(console, settings.total_tokens) as progress:
            status, killed, regions = _train(settings, directory, group, progress)
        seconds = time.monotonic() - began
        summary = _summary(settings, directory, status, killed, seconds) | ({"regions": regions} if regions else {})
        solo = _alone(settings, status, console) if settings.solo else None
        if solo is not None:
            summary["solo_validation_loss"] = solo
    console.print(summary_table(summary, solo))
    if settings.json_path is not None:
        settings.json_path.write_text(json.dumps(summary, indent=2) + "\n")


def _check_writable(settings: DemoSettings) -> None:
    """Raises DemoError for unusable paths before training begins."""
    if settings.data is not None and not os.access(settings.data, os.R_OK):
        raise DemoError(f"--data {settings.data} cannot be read: give a readable text file or folder")
    if settings.json_path is not None:
        try:
            settings.json_path.touch()
        except OSError as error:
            raise DemoError(
                f"--json {settings.json_path} cannot be written ({error.strerror}): give another path"
            ) from error


def _train(
    settings: DemoSettings, directory: Path, group: Children, progress: Progress
) -> tuple[pb.StatusReply, Killed, dict[str, dict[str, Any]]]:
    options = ["--fragments", str(FRAGMENTS), "--snapshot-every-s", "30", "--total-tokens", str(settings.total_tokens)]
    options += ["--record"] if settings.keep is not None else []
    core, address = group.start_core(directory / "run", "127.0.0.1:0", options)
    progress.note(f"the core listens on {address}; starting {settings.count} learners")
    if find_spec("fastapi") is not None:  # the dashboard is an optional extra
        _, url = group.start_dashboard("127.0.0.1:0", address)
        progress.note(f"dashboard: {url}")
    regions = Regions(group, directory, address, [region_name(n) for n in range(settings.regions)])
    servers = [region.address for region in regions.all] or [address]
    commands = [_learner(settings, n, servers[n % len(servers)]) for n in range(settings.count)]
    learners = [group.start(settings.name(n), command) for n, command in enumerate(commands)]
    killed, mended_at = Killed(), 0.0
    with grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 1000)]) as channel:
        stub = rpc.OperatorStub(channel)
        while any(learner.process.poll() is None for learner in learners):
            time.sleep(POLL_S)
            _check(learners, core, *(child for region in regions.all for child in (region.front, region.relay)))
            status = _status(stub)
            progress.show(status)
            done = status.tokens_trained / settings.total_tokens
            if settings.kills and not killed.learner and done >= KILL_LEARNER_AT:
                victim = min(1, settings.count - 1)
                learners[victim].kill()
                progress.note(f"killed learner {learners[victim].name} with SIGKILL; restarting it")
                learners[victim] = group.start(settings.name(victim), learners[victim].command)
                killed.learner += 1
            elif settings.kills and regions.all and not killed.front and done >= KILL_FRONT_AT:
                regions.kill_front(regions.all[0])
                progress.note(f"killed the front of {regions.all[0].name} with SIGKILL; restarted it")
                killed.front += 1
            elif settings.kills and regions.all and not killed.cuts and done >= CUT_AT:
                regions.cut(regions.all[-1])
                progress.note(f"cut the link of {regions.all[-1].name} for {CUT_S:.0f} s; its learners keep training")
                killed.cuts, mended_at = 1, time.monotonic() + CUT_S
            elif mended_at and time.monotonic() >= mended_at:
                regions.restore(regions.all[-1])
                mended_at = 0.0
            elif settings.kills and not killed.core and done >= KILL_CORE_AT:
                core.kill()
                progress.note("killed the core with SIGKILL; restarting it while the learners keep training")
                core, _ = group.start_core(directory / "run", address, options)
                killed.core += 1
        _check(learners, core)
        status = _settled(stub)
        progress.note("all learners have left")
        for path, initial in ((directory / "first.safetensors", True), (directory / "last.safetensors", False)):
            request = pb.ExportCheckpointRequest(initial=initial)
            with open_stream("ExportCheckpoint", stub.ExportCheckpoint(request)) as call, path.open("wb") as file:
                file.writelines(reply.chunk for reply in call)
    figures = regions.figures()
    group.stop(core)
    return status, killed, figures


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
    """Retries until the core answers, because a restart breaks connections. Raises DemoError after ANSWER_S seconds."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            status: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=ANSWER_S, wait_for_ready=True)
            return status
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise DemoError(f"the core does not answer: {error.details()}") from error


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
    settings: DemoSettings, directory: Path, status: pb.StatusReply, killed: Killed, seconds: float
) -> dict[str, Any]:
    counts, wire = status.contributions, status.wire
    return {
        "learners": settings.count,
        "parameters": status.parameters,
        "merges": status.merges,
        "tokens_trained": status.tokens_trained,
        "tokens_merged": round(status.tokens_merged),
        "validation_loss": {
            "first": _evaluate(settings, directory / "first.safetensors"),
            "last": _evaluate(settings, directory / "last.safetensors"),
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
        "kills": {"learner": killed.learner, "core": killed.core}
        | ({"front": killed.front, "link": killed.cuts} if settings.regions else {}),
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
