"""Measures the cost of a front: python -m benchmarks.data_plane.fronts [--size 124m] [--json PATH].

The benchmark compares the CPU seconds of an outer sync of two learners with and without a front, in alternating pairs.
It also measures the front's peak memory, and its memory with 100 learners that follow and report through the front.
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

from atoll.demo.processes import children

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane.idle_learners import resident_bytes
from benchmarks.data_plane.sync import measure, wait

LEARNERS = 2
CROWD = 100
PAIRS = 2
SYNCS = 3
WINDOW_S = 10.0
MAX_MORE, MAX_BYTES = 0.25, 200e6


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a front. cpu_s, wall_s: times of all syncs, (without, with) a front. front_cpu_s: the front's share.

    sync_bytes: a front's peak memory in syncs. crowd_bytes: its memory with CROWD learners.
    """

    cpu_s: tuple[list[float], list[float]]
    wall_s: tuple[list[float], list[float]]
    front_cpu_s: list[float]
    sync_bytes: int
    crowd_bytes: int


def cost(size: str) -> Cost:
    """Measures CPU time, wall-clock time and memory. size: the model's size, a key of SIZES."""
    cpu, wall, own, peak = ([], []), ([], []), list[float](), 0  # type: ignore[var-annotated]
    for pair in range(PAIRS):
        for behind in (False, True) if pair % 2 else (True, False):
            measured = measure(LEARNERS, size, SYNCS, behind=behind)
            cpu[behind].extend(sync.cpu_s for sync in measured.syncs)
            wall[behind].extend(sync.wall_s for sync in measured.syncs)
            peak = max(peak, measured.front_bytes)
            if behind:
                own.extend(sync.front_cpu_s for sync in measured.syncs)
    return Cost(cpu, wall, own, peak, crowd_bytes())


def crowd_bytes() -> int:
    """Returns the resident memory of a front with CROWD learners."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        place = Path(directory)
        core, address = group.start_core(place / "run", "127.0.0.1:0", ["--inner-steps", "10000"])
        front, near = group.start_front("front", "127.0.0.1:0", address)
        crowd = group.start(
            "crowd", [sys.executable, "-m", "benchmarks.data_plane.idle_learners", str(CROWD), near, directory]
        )
        wait([crowd], [place / "first"])
        crowd.process.send_signal(signal.SIGUSR1)
        wait([crowd], [place / "all"])
        time.sleep(WINDOW_S)  # the learners report during this time
        found = resident_bytes(front)
        crowd.process.send_signal(signal.SIGTERM)
        wait([crowd], [place / "lost"])
        if lost := int((place / "lost").read_text()):
            raise SystemExit(f"{lost} of {CROWD} learners lost their connection")
        for child in (crowd, front, core):
            group.stop(child)
    return found


def main() -> None:
    """Measures, prints the figures, and exits with an error if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="124m")
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    found = cost(arguments.size)
    without, through = map(statistics.median, found.cpu_s)
    print(f"CPU seconds per sync: {without:.2f} without a front, {through:.2f} with one", end=" ")
    print(f"({statistics.median(found.front_cpu_s):.2f} in the front): {through / without - 1:+.0%} (limit +25 %)")
    print(f"wall-clock: {statistics.median(found.wall_s[0]):.2f} s vs. {statistics.median(found.wall_s[1]):.2f} s")
    print(f"memory of a front: at most {found.sync_bytes / 1e6:.0f} MB during syncs", end=", ")
    print(f"{found.crowd_bytes / 1e6:.0f} MB with {CROWD} learners (limit 200 MB)")
    if arguments.json_path is not None:
        write_record(arguments.json_path, asdict(found), under)
    if through > (1 + MAX_MORE) * without or max(found.sync_bytes, found.crowd_bytes) > MAX_BYTES:
        raise SystemExit("a front exceeds its CPU or memory limit: see the figures above")


if __name__ == "__main__":
    main()
