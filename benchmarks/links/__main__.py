"""Compares an outer sync with torchft's over links of many rates and round trips: `make bench-links`.

python -m benchmarks.links --json PATH --plot PATH [--rates 0.1 0.3] [--learners 2]

Each learner, and each of torchft's replicas, has its own link of the given rate in both directions. The round trip is
that between a learner and the core, or between two replicas. Needs root, and uses its own network namespaces.

Links with a delay are emulated in user space, which two CPUs cannot do at 1 Gbit/s and more. There, only links without
a delay are measured, which the kernel shapes. Cells with a delay at these rates are modelled: the time without the
delay, plus what the same round trip added at MODELLED_FROM. A file at PATH keeps its cells that this call does not
measure.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.demo.processes import Children
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane import sync
from benchmarks.data_plane.loopback import Loopback, Placed
from benchmarks.data_plane.rows import Row
from benchmarks.links import plots
from benchmarks.links.sites import JUMBO, BehindLinks, sites
from benchmarks.peers import torchft_sync

LEARNERS = (2, 4)
EMULATED = (0.1, 0.3)  # Gbit/s; with delays
SHAPED = (1.0, 3.0, 10.0)  # Gbit/s; without delays
ROUND_TRIPS_MS = (1.0, 20.0, 80.0, 160.0)
QUICK_MS = 0.0  # the round trip of a shaped link, below 1 ms
MODELLED_FROM = 0.3  # Gbit/s
FASTER_UP_TO, FASTER_FROM_MS = 3.0, 20.0  # the target: faster than torchft up to this rate, or from this round trip
SYNCS = {0.1: 2, 0.3: 3, 1.0: 5, 3.0: 5, 10.0: 5}


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Median seconds of a sync over links of one kind. measured: False for a modelled cell."""

    learners: int
    rate_gbit: float
    round_trip_ms: float
    atoll_s: float
    torchft_s: float
    measured: bool = True

    @property
    def key(self) -> tuple[int, float, float]:
        """The number of learners, and the links' rate and round trip."""
        return self.learners, self.rate_gbit, self.round_trip_ms

    @property
    def has_target(self) -> bool:
        """Whether a sync over these links should be faster than torchft's."""
        return self.rate_gbit <= FASTER_UP_TO or self.round_trip_ms >= FASTER_FROM_MS

    def row(self) -> Row:
        """Returns the ratio as a row of a report."""
        trip = f"{self.round_trip_ms:g} ms" if self.round_trip_ms else "below 1 ms"
        name = f"{self.learners} learners, {self.rate_gbit:g} Gbit/s, round trip {trip}"
        how = "measured" if self.measured else "modelled"
        told = f"{self.atoll_s:.2f} s vs. {self.torchft_s:.2f} s, {how}"
        return Row(name, self.atoll_s / self.torchft_s, 1.0, "x torchft", told)


def measured(python: Path, size: str, learners: int, rate_gbit: float, round_trip_ms: float) -> Cell:
    """Measures torchft, Atoll and torchft again. python: the path of torchft's Python.

    Raises SystemExit if a process fails.
    """
    syncs = SYNCS[rate_gbit]
    home_ms, across_ms = round_trip_ms / 2, round_trip_ms / 4  # a packet between two sites crosses two links
    peer = torchft_sync.measure(python, learners, size, (syncs + 1) // 2, _placed(learners, rate_gbit, across_ms))
    mine = sync.measure(learners, size, syncs, placed=_placed(learners, rate_gbit, home_ms))
    again = torchft_sync.measure(python, learners, size, syncs // 2, _placed(learners, rate_gbit, across_ms))
    atoll_s, torchft_s = mine.median(lambda one: one.wall_s), statistics.median(peer.and_then(again).wall_s)
    return Cell(learners, rate_gbit, round_trip_ms, atoll_s, torchft_s)


def _placed(learners: int, rate_gbit: float, delay_ms: float) -> Placed:
    @contextlib.contextmanager
    def placed(group: Children, directory: Path) -> Iterator[Loopback]:
        names = [f"site{number}" for number in range(learners)]
        with sites(group, directory, names, 1000 * rate_gbit, delay_ms, JUMBO) as made:
            yield BehindLinks(made)

    return placed


def modelled(cells: Iterable[Cell]) -> list[Cell]:
    """Returns the cells with a delay at rates whose delays were not measured, as far as `cells` allows."""
    known = {cell.key: cell for cell in cells if cell.measured}
    found = []
    for (learners, rate, trip), quick in known.items():
        base = known.get((learners, MODELLED_FROM, min(ROUND_TRIPS_MS)))
        if rate not in SHAPED or trip != QUICK_MS or base is None:
            continue
        for long in ROUND_TRIPS_MS[1:]:
            if (far := known.get((learners, MODELLED_FROM, long))) is not None:
                atoll_s = quick.atoll_s + max(0.0, far.atoll_s - base.atoll_s)
                torchft_s = quick.torchft_s + max(0.0, far.torchft_s - base.torchft_s)
                found.append(Cell(learners, rate, long, atoll_s, torchft_s, measured=False))
    return found


def crossing_gbit(cells: Iterable[Cell], learners: int) -> float | None:
    """Returns the rate above which torchft's sync is faster, over links with the shortest round trips.

    Interpolates between the neighbouring rates on logarithmic axes. None: Atoll's sync is faster at all rates.
    """
    line = sorted(cell for cell in cells if cell.learners == learners and cell.round_trip_ms <= min(ROUND_TRIPS_MS))
    logs = [(math.log(cell.rate_gbit), math.log(cell.atoll_s / cell.torchft_s)) for cell in line]
    for (rate, ratio), (next_rate, next_ratio) in itertools.pairwise(logs):
        if ratio < 0.0 <= next_ratio:
            return math.exp(rate - ratio * (next_rate - rate) / (next_ratio - ratio))
    return None


def wanted(rates: Iterable[float], learners: Iterable[int]) -> Iterator[tuple[int, float, float]]:
    """Yields the learners, rate and round trip of each cell to measure, slowest links last."""
    for rate in sorted(rates, reverse=True):
        for count in learners:
            for trip in ROUND_TRIPS_MS if rate in EMULATED else (QUICK_MS,):
                yield count, rate, trip


def read(path: Path | None, commit: str) -> dict[tuple[int, float, float], Cell]:
    """Returns the measured cells in an earlier file of the same commit, or none."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text())
    if record.get("conditions", {}).get("commit") != commit:
        return {}
    return {cell.key: cell for cell in (Cell(**each) for each in record["cells"]) if cell.measured}


def data(cells: list[Cell]) -> dict[str, Any]:
    """Returns the cells, and the rows of those with a target, as JSON values."""
    rows = [cell.row() for cell in cells if cell.has_target]
    return {"cells": [asdict(cell) for cell in cells], "rows": [asdict(row) | {"holds": row.holds} for row in rows]}


def main() -> None:
    """Measures, prints a table, and writes cells as JSON and as a plot after each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, dest="json_path")
    parser.add_argument("--plot", type=Path, default=Path("build/links.svg"), help="write the plot to this file")
    parser.add_argument("--rates", type=float, nargs="*", choices=sorted(SYNCS), default=sorted(SYNCS), help="Gbit/s")
    parser.add_argument("--learners", type=int, nargs="*", choices=LEARNERS, default=LEARNERS)
    parser.add_argument("--size", default="124m", help="the model; a smaller one shows only whether this works")
    arguments, under = parser.parse_args(), conditions()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run this command as root")
    console, python = Console(), torchft_sync.install()
    kept = read(arguments.json_path, under["commit"])
    cells = list[Cell]()
    for key in wanted(arguments.rates, arguments.learners):
        kept[key] = measured(python, arguments.size, *key)
        cells = sorted([*kept.values(), *modelled(kept.values())])
        row = kept[key].row()
        console.print(f"{row.name}: {row.value:.2f} x torchft;", row.beside)
        if arguments.json_path is not None:
            write_record(arguments.json_path, data(cells), under)
    table = Table("links", "ratio to torchft", "seconds", "target")
    for cell in cells:
        row = cell.row()
        target = ("holds" if row.holds else "MISSED") if cell.has_target else "none"
        table.add_row(row.name, f"{row.value:.2f}", row.beside, target)
    console.print(table)
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    plots.crossings(cells, {count: crossing_gbit(cells, count) for count in arguments.learners}, arguments.plot)


if __name__ == "__main__":
    main()
