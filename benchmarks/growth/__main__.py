"""`make bench-growth`: how the cost of outer syncs grows. ARGS="--only learners --json PATH --plot PATH".

Curves with real learners measure whole syncs (see `benchmarks.data_plane.sync`). Curves with synthetic learners measure
the core and the fronts: these learners send random work, and adopt nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.demo.processes import Child, Children, children
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane import sync
from benchmarks.data_plane.idle_learners import resident_bytes
from benchmarks.data_plane.loopback import Loopback
from benchmarks.data_plane.sync import cpu_s, peak_bytes, wait
from benchmarks.growth import plots
from benchmarks.growth.point import Point
from benchmarks.shards.large_model import tensors_of, write_model

SYNCS = 3
SMALL = 25e6  # parameters of the synthetic model where something else grows
NEWCOMERS = 200


@dataclass(frozen=True, slots=True)
class Cores:
    """The processes of one point. address: of the core or registrar. place: folder of the files."""

    group: Children
    place: Path
    cores: list[Child]
    address: str


@contextmanager
def synthetic_run(parameters: float, shards: int = 1) -> Iterator[Cores]:
    """Context manager for cores that serve a random model."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        place = Path(directory)
        write_model(place / "model.safetensors", tensors_of(parameters))
        options = ["--init", str(place / "model.safetensors")]
        cores, address = sync.start_cores(group, place, shards, options, Loopback())
        yield Cores(group, place, cores, address)


def synthetic(curve: str, x: float, learners: int, parameters: float = SMALL, fronts: int = 0) -> Point:
    """Measures syncs of synthetic learners. fronts: number of fronts, among which the learners are divided."""
    with synthetic_run(parameters) as run:
        begun = [run.group.start_front(f"front {n}", "127.0.0.1:0", run.address) for n in range(fronts)]
        words = [str(learners), str(parameters), str(SYNCS + 1), str(run.place)]
        words += [address for _, address in begun] or [run.address]
        crowd = run.group.start("crowd", [sys.executable, "-m", "benchmarks.growth.crowd", *words])
        wait([crowd], [run.place / "crowd.ready"])
        mine, theirs = run.cores, [child for child, _ in begun]
        walls, core_s, front_s = [], [], []
        for number in range(SYNCS + 1):
            before, began = (_cpu_s(mine), _cpu_s(theirs)), time.monotonic()
            (run.place / f"go.{number}").touch()
            wait([crowd], [run.place / f"crowd.{number}"])
            walls.append(time.monotonic() - began)
            core_s.append(_cpu_s(mine) - before[0])
            front_s.append(_cpu_s(theirs) - before[1])
        crowd.process.wait(sync.MAX_WAIT_S)
        peak = max(map(peak_bytes, mine))
    wall, core, front = (statistics.median(each[1:]) for each in (walls, core_s, front_s))
    return Point(curve, x, "synthetic", learners, parameters, wall, core, front, peak)


def _cpu_s(processes: list[Child]) -> float:
    return sum(map(cpu_s, processes))


def real(curve: str, x: float, *, learners: int = 2, size: str = "25m", shards: int = 1, fragments: int = 24) -> Point:
    """Measures syncs of real learners."""
    found = sync.measure(learners, size, SYNCS, shards=shards, fragments=fragments)
    wall, core, every = (found.median(of) for of in (lambda s: s.wall_s, lambda s: s.core_cpu_s, lambda s: s.cpu_s))
    return Point(
        curve, x, "real", learners, found.parameters, wall, core, every - core, found.core_bytes, found.learner_bytes
    )


def of_parameters() -> Iterator[Point]:
    """25M to 482M parameters with two real learners, and to 1B with two synthetic ones."""
    for size in ("25m", "124m", "500m"):
        point = real("parameters", 0.0, size=size)
        yield point.at(point.parameters)
    for parameters in (25e6, 124e6, 500e6, 1e9):
        yield synthetic("parameters, synthetic learners", parameters, 2, parameters)


def of_learners() -> Iterator[Point]:
    """2 to 64 synthetic learners that call the core."""
    for learners in (2, 4, 8, 16, 32, 64):
        yield synthetic("learners", learners, learners)


def of_fronts() -> Iterator[Point]:
    """32 synthetic learners that call the core, or are divided among fronts."""
    for fronts in (0, 1, 2, 4, 8):
        yield synthetic("fronts", fronts, 32, fronts=fronts)


def of_fragments() -> Iterator[Point]:
    """6 to 96 fragments of a model of 25M parameters."""
    for fragments in (6, 12, 24, 48, 96):
        yield real("fragments", fragments, fragments=fragments)


def of_shards() -> Iterator[Point]:
    """1 to 4 shards on this machine, with two real learners."""
    for shards in (1, 2, 4):
        yield real("shards", shards, size="124m", shards=shards)


def of_storm() -> Iterator[Point]:
    """Learners that join within a second and fetch everything of one run."""
    for newcomers in (NEWCOMERS // 4, NEWCOMERS):
        with synthetic_run(SMALL) as run:
            words = [str(newcomers), str(SMALL), str(run.place), run.address]
            crowd = run.group.start("storm", [sys.executable, "-m", "benchmarks.growth.storm", *words])
            wait([crowd], [run.place / "storm.ready"])
            before, core = _cpu_s(run.cores), run.cores[0]
            resting = resident_bytes(core)
            (run.place / "storm.go").touch()
            wait([crowd], [run.place / "storm.json"])
            told = json.loads((run.place / "storm.json").read_text())
            used, grown = _cpu_s(run.cores) - before, peak_bytes(core) - resting
        yield Point("joining storm", newcomers, "synthetic", newcomers, SMALL, max(told["seconds"]), used, 0.0, grown)


CURVES: dict[str, Callable[[], Iterator[Point]]] = {
    "parameters": of_parameters,
    "learners": of_learners,
    "fragments": of_fragments,
    "fronts": of_fronts,
    "shards": of_shards,
    "storm": of_storm,
}


def main() -> None:
    """Measures the curves, prints their points, and writes them as JSON and as a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CURVES, nargs="+", default=list(CURVES))
    parser.add_argument("--json", type=Path, dest="json_path")
    parser.add_argument("--plot", type=Path)
    arguments, under, console = parser.parse_args(), conditions(), Console()
    table = Table("curve", "x", "learners", "seconds", "core CPU s", "other CPU s", "core's peak MB", "learner's MB")
    points = []
    for name in arguments.only:
        for point in CURVES[name]():
            points.append(point)
            console.print(f"{point.curve} = {point.x:g}: {point.wall_s:.2f} s, core {point.core_cpu_s:.2f} CPU s")
            table.add_row(*point.cells())
            if arguments.json_path is not None:  # after each point, in case a later one fails
                write_record(arguments.json_path, {"points": [asdict(point) for point in points]}, under)
    console.print(table)
    if arguments.plot is not None:
        plots.curves(points, arguments.plot)


if __name__ == "__main__":
    main()
