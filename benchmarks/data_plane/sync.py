"""Measures outer syncs of a whole model over loopback: seconds, CPU seconds, bytes and memory.

A sync begins when every learner has trained and all fragments are due. It ends when each learner has adopted all
fragments, with contributions of all learners. fsync, checksums, zstd and merging by direction are on; snapshots are
made when they are due, in any sync.
python -m benchmarks.data_plane.sync --learners 2 --size 124m --syncs 5 [--front] [--shards 4] --json PATH
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from atoll.demo.processes import Child, Children, children

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane.loopback import Loopback, Placed, on_loopback
from benchmarks.interface_bytes import loopback_bytes

FRAGMENTS = 24
OPTIONS = ["--quorum", "100%", "--snapshot-every-s", "3600"]
MAX_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Sync:
    """One sync. began: monotonic seconds. wall_s: until the last learner finished. cpu_s: all processes.

    bytes: on loopback, with headers.
    """

    began: float
    wall_s: float
    cpu_s: float
    core_cpu_s: float
    front_cpu_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Several syncs. core_bytes: peak resident memory of the largest core process, one per shard.

    learner_bytes: growth of a learner's peak since it began.
    """

    learners: int
    parameters: int
    syncs: list[Sync]
    core_bytes: int
    learner_bytes: int
    front_bytes: int = 0
    shards: int = 1

    def median(self, of: Callable[[Sync], float]) -> float:
        """Returns a figure's median over the syncs. of: returns the figure of a sync."""
        return statistics.median(map(of, self.syncs))

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes on the wire, both ways, per parameter per learner. Nothing else may use loopback during a sync."""
        return self.median(lambda sync: sync.bytes) / self.learners / self.parameters


def measure(
    learners: int,
    size: str,
    syncs: int,
    *,
    behind: bool = False,
    shards: int = 1,
    compression: str = "auto",
    placed: Placed = on_loopback,
    fragments: int = FRAGMENTS,
) -> Measured:
    """Runs the cores and learners through one sync to warm up, and then through `syncs` measured ones.

    size: the model's size, a key of ALL_SIZES. behind: whether learners call a front, which must be on loopback.
    shards: number of core processes. compression: the run's setting. placed: where the processes run. Raises SystemExit
    if a learner fails.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        children(Path(directory)) as group,
        placed(group, Path(directory)) as placement,
    ):
        place = Path(directory)
        cores, address = start_cores(group, place, shards, ["--compression", compression], placement, fragments)
        fronts = list[Child]()
        if behind:
            front, address = group.start_front("front", "127.0.0.1:0", address)
            fronts.append(front)
        learner = [sys.executable, "-m", "benchmarks.data_plane.sync_learner"]
        islands = []
        for n in range(learners):
            words = [*learner, str(n), placement.reached(n, address), size, str(syncs), directory]
            islands.append(group.start(f"learner {n}", placement.at_worker(n, words)))
        found, told = [], list[dict[str, float]]()
        for number in range(syncs + 1):
            wait(islands, [place / f"{n}.ready.{number}" for n in range(learners)])
            before, began = _used(cores, fronts, islands), time.monotonic()
            (place / f"go.{number}").touch()
            done = [place / f"{n}.{number}" for n in range(learners)]
            wait(islands, done)
            after = _used(cores, fronts, islands)
            core_s, front_s, islands_s, moved = (new - old for old, new in zip(before, after, strict=True))
            told = [json.loads(path.read_text()) for path in done]
            merged = sum(one["merged"] for one in told)
            if number and merged != learners * fragments:
                raise SystemExit(f"{merged:.0f} of {learners * fragments} contributions were merged in their rounds")
            wall = max(one["ended"] for one in told) - began
            found.append(Sync(began, wall, core_s + front_s + islands_s, core_s, front_s, int(moved)))
        (place / "leave").touch()
        for child in islands:
            child.process.wait(MAX_WAIT_S)
        peak, front_peak = max(map(peak_bytes, cores)), max(map(peak_bytes, fronts), default=0)
        for child in (*fronts, *reversed(cores)):
            group.stop(child)
    added = max(int(one["added_bytes"]) for one in told)
    return Measured(learners, int(told[0]["parameters"]), found[1:], peak, added, front_peak, shards)


def _used(cores: list[Child], fronts: list[Child], islands: list[Child]) -> tuple[float, float, float, float]:
    """Returns the CPU seconds of the cores, the fronts and the learners so far, and the bytes on loopback."""
    core_s, front_s, islands_s = (sum(map(cpu_s, some)) for some in (cores, fronts, islands))
    return core_s, front_s, islands_s, loopback_bytes()


def start_cores(
    group: Children, place: Path, shards: int, options: list[str], placement: Loopback, fragments: int = FRAGMENTS
) -> tuple[list[Child], str]:
    """Starts a core, or a registrar with shard 0 and the other shards. Returns them and the address for learners.

    options: further options of the core or registrar.
    """
    words = [sys.executable, "-m", "benchmarks.data_plane.sync_core", str(place), "core", "--listen", placement.listen]
    command = placement.at_core([*words, *placement.core_options])
    first = [*OPTIONS, "--fragments", str(fragments), *options]
    first += ["--shard", f"0/{shards}"] if shards > 1 else []
    cores = [group.start("core", [*command, "--dir", str(place / "run"), *first], piped=True)]
    address = group.serving(cores[0])
    for number in range(1, shards):
        mine = ["--dir", str(place / f"shard{number}"), "--shard", f"{number}/{shards}", "--registrar", address]
        mine += ["--snapshot-every-s", "3600"]
        cores.append(group.start(f"shard{number}", [*command, *mine], piped=True))
        group.serving(cores[-1])
    return cores, address


def wait(islands: list[Child], marks: list[Path]) -> None:
    """Waits until all files `marks` exist. Raises SystemExit if a learner fails, or after MAX_WAIT_S seconds."""
    deadline = time.monotonic() + MAX_WAIT_S
    while not all(path.exists() for path in marks):
        for child in islands:
            if child.process.poll() not in {None, 0}:
                raise SystemExit(f"{child.name} ended: {child.tail()}")
        if time.monotonic() > deadline:
            raise SystemExit(f"{marks[0].name} did not appear within {MAX_WAIT_S:.0f} s")
        time.sleep(0.01)


def cpu_s(child: Child) -> float:
    """Returns the CPU seconds that a child process has used so far."""
    times = psutil.Process(child.process.pid).cpu_times()
    return float(times.user + times.system)


def peak_bytes(child: Child) -> int:
    """Returns the peak resident memory of a process."""
    lines = Path(f"/proc/{child.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10


def main() -> None:
    """Measures, prints the figures, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--size", default="124m")
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--front", action="store_true")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--compression", default="auto", help="as in atoll core --compression")
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    measured = measure(
        arguments.learners,
        arguments.size,
        arguments.syncs,
        behind=arguments.front,
        shards=arguments.shards,
        compression=arguments.compression,
    )
    for sync in measured.syncs:
        parts = f"core {sync.core_cpu_s:.2f} s, front {sync.front_cpu_s:.2f} s"
        print(f"wall {sync.wall_s:.2f} s, CPU {sync.cpu_s:.2f} s ({parts})")
    print(f"median: wall {measured.median(lambda s: s.wall_s):.2f} s, CPU {measured.median(lambda s: s.cpu_s):.2f} s")
    print(f"{measured.bytes_per_parameter:.3f} bytes per parameter per learner, both ways")
    print(f"core's peak memory {measured.core_bytes / 4 / measured.parameters:.2f} x the float32 model", end=", ")
    print(f"learner's extra memory {measured.learner_bytes / 4 / measured.parameters:.2f} x")
    if arguments.json_path is not None:
        write_record(arguments.json_path, asdict(measured), under)


if __name__ == "__main__":
    main()
