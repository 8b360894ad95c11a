"""Measures what a run over many shards costs while nothing is merged: the shards' calls, and idle learners.

The model is small, and each shard has one fragment. The learners run the real agent, follow and report to every shard,
and take a step every 10 s (see data_plane.idle_learners). A round is due after 10,000 steps.
python -m benchmarks.shards.control_traffic --shards 64 --learners 1 --json PATH
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.demo.processes import Child, Children, children

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane.idle_learners import resident_bytes
from benchmarks.data_plane.sync import cpu_s, wait
from benchmarks.interface_bytes import loopback_bytes

WINDOW_S, WINDOWS = 10.0, 3
SETTLING_S = 20.0  # after the last learner has joined
LIMITS = ["--limit-calls", "1048576", "--limit-learners", "65536"]


@dataclass(frozen=True, slots=True)
class ControlTraffic:
    """The cost of one window, the median over the windows. cpus: number of CPUs in use.

    bytes_per_s: on loopback, with headers, between all processes. shard_cpus: of the busiest other shard.
    """

    shards: int
    learners: int
    bytes_per_s: float
    registrar_cpus: float
    shard_cpus: float
    registrar_bytes: int
    shard_bytes: int


def start_cores(group: Children, place: Path, shards: int) -> list[Child]:
    """Starts a registrar with shard 0, and then the other shards. Returns them in order."""
    options = ["--fragments", str(shards), "--inner-steps", "10000", *LIMITS]
    first = group.launch_core("shard0", place / "shard0", "127.0.0.1:0", [*_shard(0, shards), *options])
    registrar = group.serving(first)
    others = [
        group.launch_core(
            f"shard{number}",
            place / f"shard{number}",
            "127.0.0.1:0",
            [*_shard(number, shards), "--registrar", registrar, *LIMITS],
        )
        for number in range(1, shards)
    ]
    for each in others:
        group.serving(each)
    (place / "address").write_text(registrar)
    return [first, *others]


def _shard(number: int, shards: int) -> list[str]:
    return ["--shard", f"{number}/{shards}"] if shards > 1 else []


def measure(shards: int, learners: int) -> ControlTraffic:
    """Runs the cores and the learners, and measures them when all have joined."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        place = Path(directory)
        cores = start_cores(group, place, shards)
        address = (place / "address").read_text()
        command = [sys.executable, "-m", "benchmarks.data_plane.idle_learners", str(learners), address, directory]
        crowd = group.start("crowd", [*command, str(shards)])
        wait([crowd], [place / "first"])
        crowd.process.send_signal(signal.SIGUSR1)
        wait([crowd], [place / "all"])
        time.sleep(SETTLING_S)
        windows = [_window(cores) for _ in range(WINDOWS)]
        peaks = [resident_bytes(each) for each in cores]
        for child in (crowd, *reversed(cores)):
            group.stop(child)
    traffic, registrar, busiest = (statistics.median(each) for each in zip(*windows, strict=True))
    return ControlTraffic(shards, learners, traffic, registrar, busiest, peaks[0], max(peaks[1:], default=0))


def _window(cores: list[Child]) -> tuple[float, float, float]:
    """Returns the bytes per second, and the CPUs that the registrar and the busiest other shard use."""
    used, began, moved = [cpu_s(each) for each in cores], time.monotonic(), loopback_bytes()
    time.sleep(WINDOW_S)
    took_s = time.monotonic() - began
    cpus = [(cpu_s(each) - before) / took_s for each, before in zip(cores, used, strict=True)]
    return (loopback_bytes() - moved) / took_s, cpus[0], max(cpus[1:], default=0.0)


def main() -> None:
    """Measures, prints the figures, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--learners", type=int, default=1)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    found = measure(arguments.shards, arguments.learners)
    print(f"{found.shards} shards, {found.learners} learners: {found.bytes_per_s / 1e3:.1f} kB/s in total")
    print(f"registrar: {found.registrar_cpus:.3f} CPUs, {found.registrar_bytes / 2**20:.0f} MiB")
    print(f"busiest other shard: {found.shard_cpus:.3f} CPUs, {found.shard_bytes / 2**20:.0f} MiB")
    if arguments.json_path is not None:
        write_record(arguments.json_path, asdict(found), under)


if __name__ == "__main__":
    main()
