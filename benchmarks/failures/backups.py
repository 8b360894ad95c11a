"""Backs up a core's directory while learners train, and restores the last backup into another directory.

Learners train for a time without backups, and then while backups follow each other without a pause. The benchmark
compares the durations of `Learner.step()` and the merges per second. After the restore, it compares each fragment's
checksums with those in the ledger of the core that ran.

python -m benchmarks.failures.backups --size 25m --learners 2 --backups 5 --json PATH
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from atoll.demo.processes import Children, children
from atoll_server.backups.backup_folder import backups_in, read_record
from atoll_server.cli.run_directory import read_run
from atoll_server.ledger import shard_ledger
from atoll_server.ledger.database import read_ledger
from atoll_wire import outer_pb2_grpc as rpc

from benchmarks.conditions import conditions, write_record
from benchmarks.failures.core_kills import ask, until

SAID = re.compile(r"([\d.]+) MB copied, ([\d.]+) MB shared with the previous backup, ([\d.]+) s")
MERGES_BEFORE = 2  # merges of each fragment before the measurement
START_S = 900.0  # limit on the time until then, also on a busy machine


def main() -> int:
    """Runs the benchmark and prints its figures. Returns 1 if the restored parameters differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="25m", help="size of the reference model")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="text windows per step of a learner")
    parser.add_argument("--backups", type=int, default=5)
    parser.add_argument("--apart-s", type=float, default=15.0, help="seconds between the ends and starts of backups")
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    with tempfile.TemporaryDirectory() as place, children(Path(place)) as group:
        found = run(group, Path(place), arguments)
    print(json.dumps(found, indent=2))
    if arguments.json_path is not None:
        write_record(arguments.json_path, found, under)
    return 0 if found["identical"] else 1


def run(group: Children, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one run."""
    options = ["--inner-steps", "4", "--fragments", "8", "--snapshot-every-s", "30"]
    core, address = group.start_core(directory / "run", "127.0.0.1:0", options)
    names = [f"learner-{number}" for number in range(arguments.learners)]
    module = [sys.executable, "-m", "benchmarks.failures.timed_learner"]
    learners = [
        group.start(
            name, [*module, str(directory / f"{name}.npy"), name, address, "0", arguments.size, str(arguments.batch)]
        )
        for name in names
    ]
    with grpc.insecure_channel(address) as channel:
        stub = rpc.OperatorStub(channel)

        def merged() -> int:
            return sum(each.version for each in ask(stub).fragments)

        until(lambda: merged() >= 8 * MERGES_BEFORE, learners, START_S)
        marks = [(time.monotonic(), merged())]
        time.sleep(arguments.backups * arguments.apart_s)
        marks.append((time.monotonic(), merged()))
        backups = []
        for _ in range(arguments.backups):
            backups.append(back_up(directory))
            time.sleep(arguments.apart_s)
        marks.append((time.monotonic(), merged()))
        parameters = ask(stub).parameters
    for child in learners:
        child.process.send_signal(signal.SIGTERM)
    for child in learners:
        child.process.wait(120)
    core.kill()
    times = [np.load(directory / f"{name}.npy") for name in names]
    phases = [phase(times, *pair) for pair in pairwise(marks)]
    return {
        "parameters": parameters,
        "learners": arguments.learners,
        "batch": arguments.batch,
        "without_backups": phases[0],
        "with_backups": phases[1],
        "backups": backups,
        **restored(directory),
    }


def back_up(directory: Path) -> dict[str, float]:
    """Takes one backup as an operator would. Returns its figures."""
    began = time.monotonic()
    command = [sys.executable, "-m", "atoll_server", "checkpoint", "backup", str(directory / "backups")]
    done = subprocess.run(
        [*command, "--dir", str(directory / "run"), "--keep", "3"], capture_output=True, text=True, check=True
    )
    said = SAID.search(done.stdout)
    assert said is not None, done.stdout
    copied, shared, took = map(float, said.groups())
    return {"copied_mb": copied, "shared_mb": shared, "backup_s": took, "command_s": time.monotonic() - began}


def phase(times: list[Any], began: tuple[float, int], ended: tuple[float, int]) -> dict[str, float]:
    """Returns the figures between two moments. began, ended: monotonic seconds, and merges of all fragments."""
    inside = [each[(each[:, 0] >= began[0]) & (each[:, 1] <= ended[0])] for each in times]
    steps = np.concatenate([each[:, 1] - each[:, 0] for each in inside])
    gaps = np.concatenate([each[1:, 0] - each[:-1, 1] - each[:-1, 3] for each in inside])
    seconds = ended[0] - began[0]
    return {
        "seconds": seconds,
        "steps_per_s": len(steps) / seconds,
        "longest_step_s": float(steps.max()),
        "longest_gap_s": float(gaps.max()),
        "gap_s_p50": float(np.median(gaps)),
        "merges_per_s": (ended[1] - began[1]) / seconds,
    }


def restored(directory: Path) -> dict[str, Any]:
    """Verifies and restores the newest backup. Returns the durations, and whether all checksums are the logged ones."""
    backup = backups_in(directory / "backups")[-1]
    took: dict[str, float] = {}
    for name, words in {"verify": [], "restore-backup": ["--dir", str(directory / "there")]}.items():
        began = time.monotonic()
        command = [sys.executable, "-m", "atoll_server", "checkpoint", name, str(backup), *words]
        subprocess.run(command, capture_output=True, check=True)
        took[name] = time.monotonic() - began
    identical, versions = True, read_record(backup).versions
    with read_ledger(directory / "run" / "ledger.sqlite") as db:
        for index, state in read_run(directory / "there").states.items():
            row = next(shard_ledger.merges(db, 1, index, state.version - 1, state.version))
            identical &= state.checksums() == (row.theta, row.theta_pub, row.momentum)
            identical &= state.version == versions[index]
    return {"verify_s": took["verify"], "restore_s": took["restore-backup"], "identical": identical}


if __name__ == "__main__":
    raise SystemExit(main())
