"""Kills the core repeatedly while four learners train, and measures the learners' pauses and the change in the loss.

Each seed has a pair of runs. In one run, the core is killed. In the other run, an idle process is started instead.

python -m benchmarks.failures.core_kills --seeds 3 --kills 20 --standby --json PATH
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from atoll.demo.processes import Child, Children, DemoError, children
from atoll_wire import outer_pb2 as pb
from atoll_wire import outer_pb2_grpc as rpc
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record
from benchmarks.process_state import settled

NAMES = ("a", "b", "c", "d")
OPTIONS = ["--fragments", "8", "--snapshot-every-s", "30"]
STEPS_BEFORE = 20  # inner steps of the slowest learner before the first kill
APART_S = 3.0  # shortest time between two kills
MAX_WAIT_S = 120.0  # limit on the time until learners train, and until their last contributions are settled
IDLE = [sys.executable, "-c", "import time; time.sleep(3600)"]
LARGEST_STEP_S, LARGEST_RATIO, LARGEST_CHANGE = 0.050, 1.5, 0.005  # the promised limits


def main() -> int:
    """Runs all pairs and prints a table. Returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--seconds", type=float, default=190.0, help="seconds over which the kills are spread")
    parser.add_argument(
        "--standby", action="store_true", help="run a second core with --standby in both runs of a pair"
    )
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    console, rows = Console(), []
    for seed in range(arguments.seeds):
        at = moments(seed, arguments.kills, arguments.seconds)
        pair = {
            what: run(
                seed, arguments.tokens, at, kill=what == "killed", with_standby=arguments.standby, console=console
            )
            for what in ("undisturbed", "killed")
        }
        rows.append(pair)
        console.print(table(rows))
        if arguments.json_path is not None:
            write_record(arguments.json_path, {"pairs": rows}, under)
    return 0 if holds(rows) else 1


def moments(seed: int, kills: int, seconds: float) -> list[float]:
    """Returns random times in seconds, at least APART_S apart."""
    rng, free = random.Random(seed), seconds - APART_S * kills  # noqa: S311 - dice
    return [at + APART_S * number for number, at in enumerate(sorted(rng.uniform(0, free) for _ in range(kills)))]


def run(seed: int, tokens: int, at: list[float], *, kill: bool, with_standby: bool, console: Console) -> dict[str, Any]:
    """Runs four learners to the end. Returns the run's figures. at: times of kills or idle processes, in seconds."""
    with tempfile.TemporaryDirectory() as place, children(Path(place)) as group:
        directory = Path(place)
        options = [*OPTIONS, "--total-tokens", str(tokens)]
        core, address = group.start_core(directory / "run", "127.0.0.1:0", options)
        waiting = [*options, "--standby"]
        standby = group.launch_core("standby 0", directory / "run", address, waiting) if with_standby else None
        learners = []
        for name in NAMES:
            times = str(directory / f"{name}.npy")
            command = [sys.executable, "-m", "benchmarks.failures.timed_learner", times, name, address, str(seed)]
            learners.append(group.start(name, command))
        with grpc.insecure_channel(address, options=[("grpc.max_reconnect_backoff_ms", 500)]) as channel:
            stub = rpc.OperatorStub(channel)
            until(lambda: min((each.steps for each in ask(stub).learners), default=0) >= STEPS_BEFORE, learners)
            began = time.monotonic()
            serving = []
            done = 0
            while any(child.process.poll() is None for child in learners):
                if done < len(at) and time.monotonic() - began >= at[done]:
                    done += 1
                    if kill:
                        core.kill()
                        started = time.monotonic()
                        if standby is None:
                            core, _ = group.start_core(directory / "run", address, options)
                        else:  # a supervisor would restart the dead core, which then becomes the standby
                            core, before = standby, core
                            standby = group.launch_core(f"standby {done}", directory / "run", address, waiting)
                            group.stop(before)
                            group.serving(core)
                        serving.append(time.monotonic() - started)
                    else:
                        instead(group)
                    console.print(f"seed {seed} {'kill' if kill else 'idle'} {done} of {len(at)}", highlight=False)
                time.sleep(0.02)
            status = settled(address)
            with (directory / "last.safetensors").open("wb") as file:
                for reply in stub.ExportCheckpoint(pb.ExportCheckpointRequest()):
                    file.write(reply.chunk)
        for child in filter(None, (standby, core)):
            group.stop(child)
        return figures(directory, status, learners, serving, done)


def until(met: Callable[[], bool], learners: Sequence[Child], wait_s: float = MAX_WAIT_S) -> None:
    """Waits until `met` returns True. Raises DemoError if a learner fails, or after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while not met():
        for child in learners:
            if child.process.poll():
                raise DemoError(f"{child.name} ended with status {child.process.returncode}: {child.tail()}")
        if time.monotonic() > deadline:
            raise DemoError(f"the run made no progress within {wait_s:.0f} s: {learners[0].tail()}")
        time.sleep(0.2)


def instead(group: Children) -> None:
    """Runs an idle process for as long as a core needs to start."""
    idle = group.start("idle", IDLE)
    time.sleep(1.0)
    idle.process.send_signal(signal.SIGKILL)
    idle.process.wait()


def ask(stub: rpc.OperatorStub) -> pb.StatusReply:
    """Requests the status until the core answers, for at most 60 s."""
    deadline = time.monotonic() + 60
    while True:
        try:
            reply: pb.StatusReply = stub.Status(pb.StatusRequest(), timeout=10, wait_for_ready=True)
            return reply
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise


def figures(
    directory: Path, status: pb.StatusReply, learners: list[Child], serving: list[float], done: int
) -> dict[str, Any]:
    """Returns the figures of one run.

    A gap begins after a `step()` and its control (see timed_learner), and ends at the next `step()`.
    """
    from atoll.reference.train import loss_of_file  # noqa: PLC0415 - torch is loaded only after the learners have ended

    for child in learners:
        if child.process.returncode != 0:
            raise subprocess.CalledProcessError(child.process.returncode, child.command, child.tail())
    times = [np.load(directory / f"{name}.npy") for name in NAMES]
    steps = np.concatenate([each[:, 1] - each[:, 0] for each in times])
    gaps = np.concatenate([each[1:, 0] - each[:-1, 1] - each[:-1, 3] for each in times])
    counts = status.contributions
    return {
        "struck": done,
        "steps": len(steps),
        "longest_step_s": float(steps.max()),
        "step_s_p999": float(np.quantile(steps, 0.999)),
        "longest_step_cpu_s": float(max(each[:, 2].max() for each in times)),
        "longest_plain_s": float(max(each[:, 3].max() for each in times)),
        "longest_gap_s": float(gaps.max()),
        "gap_s_p50": float(np.median(gaps)),
        "gap_s_p999": float(np.quantile(gaps, 0.999)),
        "goodput": status.goodput.ratio,
        "merges": status.merges,
        "contributions": {"accepted": counts.accepted, "merged": counts.merged, "refused": counts.refused},
        "serving_s": serving,
        "validation_loss": loss_of_file(directory / "last.safetensors", "tiny", None),
    }


def ratio(pair: dict[str, Any]) -> float:
    """Returns the longest gap with kills divided by the longest gap without kills."""
    value: float = pair["killed"]["longest_gap_s"] / pair["undisturbed"]["longest_gap_s"]
    return value


def change(pair: dict[str, Any]) -> float:
    """Returns the relative change of the validation loss that the kills caused."""
    value: float = pair["killed"]["validation_loss"] / pair["undisturbed"]["validation_loss"] - 1
    return value


def holds(rows: list[dict[str, Any]]) -> bool:
    """Returns whether all pairs are within the limits. For the loss, the mean over pairs must be within its limit."""
    return (
        all(pair["killed"]["longest_step_s"] <= LARGEST_STEP_S for pair in rows)
        and all(ratio(pair) <= LARGEST_RATIO for pair in rows)
        and statistics.mean(map(change, rows)) <= LARGEST_CHANGE
    )


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table of all figures, with one column per pair."""
    shown = Table(
        "what", *(f"seed {seed}" for seed in range(len(rows))), title="core kills during training, four learners"
    )
    for what, text in (
        ("core kills", lambda p: f"{p['killed']['struck']}"),
        ("longest step(), ms", lambda p: f"{1e3 * p['killed']['longest_step_s']:.1f}"),
        ("  ... without kills", lambda p: f"{1e3 * p['undisturbed']['longest_step_s']:.1f}"),
        ("  ... of CPU time", lambda p: f"{1e3 * p['killed']['longest_step_cpu_s']:.1f}"),
        ("  ... of plain computation of the same length", lambda p: f"{1e3 * p['killed']['longest_plain_s']:.1f}"),
        ("      ... without kills", lambda p: f"{1e3 * p['undisturbed']['longest_plain_s']:.1f}"),
        ("longest gap between inner steps, ms", lambda p: f"{1e3 * p['killed']['longest_gap_s']:.0f}"),
        ("  ... without kills, with an idle process", lambda p: f"{1e3 * p['undisturbed']['longest_gap_s']:.0f}"),
        ("  ... ratio", lambda p: f"{ratio(p):.2f}"),
        ("longest start of the core, s", lambda p: f"{max(p['killed']['serving_s'], default=0):.2f}"),
        ("validation loss", lambda p: f"{p['killed']['validation_loss']:.4f}"),
        ("  ... without kills", lambda p: f"{p['undisturbed']['validation_loss']:.4f}"),
        ("  ... change", lambda p: f"{100 * change(p):+.2f} %"),
        ("goodput", lambda p: f"{p['killed']['goodput']:.4f}"),
        ("  ... without kills", lambda p: f"{p['undisturbed']['goodput']:.4f}"),
    ):
        shown.add_row(what, *(text(pair) for pair in rows))
    return shown


if __name__ == "__main__":
    sys.exit(main())
