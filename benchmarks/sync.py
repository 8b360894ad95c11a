"""One outer sync of a whole model over loopback, back to back: seconds, processor seconds, bytes and memory.

Rounds follow each other as fast as these learners step, and as many may be open as there are fragments; fsync,
checksums, zstd and merging by direction are on, and so are the snapshots that come due.
python -m benchmarks.sync --learners 2 --size 124m --syncs 5 --json PATH
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.demo.processes import Child, children

FRAGMENTS = 24
OPTIONS = ["--fragments", str(FRAGMENTS), "--inner-steps", "24", "--overlap", "24", "--snapshot-every-s", "3600"]
PATIENCE_S = 300.0
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Measured:
    """Of each sync, in the mean over consecutive ones. bytes_per_parameter: both ways, of one learner.

    cpu_s: of all processes. core_bytes: peak resident memory. learner_bytes: what joining and training added to it.
    """

    learners: int
    parameters: int
    syncs: int
    wall_s: float
    cpu_s: float
    core_cpu_s: float
    bytes_per_parameter: float
    participation: float
    core_bytes: int
    learner_bytes: int


def measure(learners: int, size: str, syncs: int) -> Measured:
    """Runs a core and its learners through one sync to warm up, and then through those that count."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        core, address = group.start_core(Path(directory) / "run", "127.0.0.1:0", OPTIONS)
        results = [Path(directory) / f"{number}.json" for number in range(learners)]
        started = [
            group.start(
                f"learner {number}",
                [sys.executable, "-m", "benchmarks.sync_learner", f"{number}", address, size, str(syncs), str(result)],
            )
            for number, result in enumerate(results)
        ]
        _all(started, Path(directory), "begun")
        core_before = cpu_s(core)
        _all(started, Path(directory), "ended")
        core_cpu = cpu_s(core) - core_before
        for child in started:
            child.process.wait(PATIENCE_S)
        told = [json.loads(result.read_text()) for result in results]
        peak = status_kb(core, "VmHWM") << 10
        group.stop(core)
    parameters = told[0]["parameters"]
    done = statistics.mean(one["adopted"] for one in told) / FRAGMENTS
    wall = statistics.mean(one["wall_s"] for one in told)
    return Measured(
        learners, parameters, syncs, wall / done, (core_cpu + sum(one["cpu_s"] for one in told)) / done,
        core_cpu / done, statistics.mean(one["bytes"] for one in told) / done / parameters,
        statistics.mean(one["merged"] / one["adopted"] for one in told), peak,
        max(one["added_bytes"] for one in told),
    )  # fmt: skip


def _all(started: list[Child], directory: Path, mark: str) -> None:
    """Waits until every learner has set a mark."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        marks = [directory / f"{number}.{mark}" for number in range(len(started))]
        if all(path.exists() for path in marks):
            return
        for child in started:
            if child.process.poll() not in {None, 0}:
                raise SystemExit(f"{child.name} ended: {child.tail()}")
        if time.monotonic() > deadline:
            raise SystemExit(f"not {mark} within {PATIENCE_S:.0f} s")
        time.sleep(0.005)


def cpu_s(child: Child) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def status_kb(child: Child, name: str) -> int:
    """A line of /proc/PID/status."""
    lines = Path(f"/proc/{child.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """Prints one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--size", default="124m")
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments = parser.parse_args()
    measured = asdict(measure(arguments.learners, arguments.size, arguments.syncs))
    for name, value in measured.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if arguments.json_path is not None:
        arguments.json_path.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
