"""Compares outer syncs over several shards with syncs over one core, in alternating runs.

Limits: CPU time at most 1.1 times that of one core, no more wall-clock time, and 12 bytes per parameter of a shard's
share plus 600 MiB of memory. The largest core process counts.
python -m benchmarks.shards.sync_cost --size 500m --shards 1 2 4 --rounds 3 --json PATH
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane.sync import Measured, Sync, measure

LEARNERS = 2
BYTES_PER_PARAMETER, BYTES = 12.0, 600 << 20


def main() -> None:
    """Measures, prints a table, and writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="500m")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4], help="the first number is the baseline")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs with each number of shards")
    parser.add_argument("--syncs", type=int, default=3, help="number of measured syncs in each run")
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under, console = parser.parse_args(), conditions(), Console()
    found: dict[int, list[Measured]] = {shards: [] for shards in arguments.shards}
    for number in range(arguments.rounds):
        for shards, each in found.items():
            each.append(measure(LEARNERS, arguments.size, arguments.syncs, shards=shards))
            wall_s, cpu_s = each[-1].median(_wall_s), each[-1].median(_cpu_s)
            console.print(f"run {number + 1}, {shards} shards: {wall_s:.2f} s, CPU {cpu_s:.2f} s")
    console.print(table(found))
    if arguments.json_path is not None:
        runs = [asdict(measured) for each in found.values() for measured in each]
        write_record(arguments.json_path, {"runs": runs}, under)


def table(found: dict[int, list[Measured]]) -> Table:
    """Returns the medians over all syncs by number of shards, with ratios to the first number."""
    first, *_ = found.values()
    rows = Table("shards", "seconds", "ratio", "CPU seconds", "ratio", "peak memory", "limit")
    for shards, each in found.items():
        share = each[0].parameters / shards
        limit = BYTES_PER_PARAMETER * share + BYTES
        times = (median(each, of) for of in (_wall_s, _cpu_s))
        ratios = (median(each, of) / median(first, of) for of in (_wall_s, _cpu_s))
        pairs = [f"{figure:.2f}" for pair in zip(times, ratios, strict=True) for figure in pair]
        peak = max(measured.core_bytes for measured in each)
        rows.add_row(str(shards), *pairs, f"{peak / 2**30:.2f} GiB", f"{limit / 2**30:.2f} GiB")
    return rows


def median(runs: list[Measured], of: Callable[[Sync], float]) -> float:
    """Returns a figure's median over the syncs of several runs. of: returns the figure of a sync."""
    return statistics.median(of(sync) for measured in runs for sync in measured.syncs)


def _wall_s(sync: Sync) -> float:
    return sync.wall_s


def _cpu_s(sync: Sync) -> float:
    return sync.cpu_s


if __name__ == "__main__":
    main()
