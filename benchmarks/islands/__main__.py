"""`make bench-islands`: measures learners with several ranks.

python -m benchmarks.islands --ranks 4 --json PATH

Memory: the largest rank's peak, with a Learner and without. Its extra memory has a limit: 2.5 times its share of the
parameters in float32, one tensor, and 200 MB. The staging of a learner checkpoint is a figure of its own. Time: the
duration of a `Learner.step()` with nothing due, which includes agreements, and the share of time in `step()` with steps
of 200 ms. A pause replaces the computation of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atoll.demo.processes import children
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record

LIMIT_SHARES, LIMIT_BYTES = 2.5, 200e6
IDLE_STEPS, PACED_STEPS, PACE_S = 3000, 150, 0.2
SMALL, MIDDLE = (4, 64), (24, 640)  # layers and width: 16 thousand parameters, and 10 million
NEVER = ["--inner-steps", "100000"]
LIMIT_IDLE_S, LIMIT_BLOCKED = 20e-6, 0.01

Ranks = list[dict[str, Any]]


def main() -> int:
    """Runs all measurements, and prints a table. Returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24, help="number of layers of the model whose memory is measured")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--json", type=Path, dest="json_path")
    arguments, under = parser.parse_args(), conditions()
    several, big, console = arguments.ranks, (arguments.layers, arguments.width), Console()
    found = {}
    for ranks in (1, several):
        found[f"idle, {ranks}"] = idle(train(ranks, SMALL, IDLE_STEPS, 0.0, NEVER))
        console.print(f"idle steps, {ranks} ranks: {found[f'idle, {ranks}']}")
        found[f"paced, {ranks}"] = blocked(train(ranks, MIDDLE, PACED_STEPS, PACE_S, ["--inner-steps", "24"]))
        console.print(f"paced steps, {ranks} ranks: {found[f'paced, {ranks}']}")
    steps = 12  # a fragment is due in each step, as by default, and several are in flight after four steps
    alone = train(several, big, steps, 0.0, None)
    console.print("memory without a learner: measured")
    learner = train(several, big, steps, 0.0, [])
    console.print("memory with a learner: measured")
    saving = train(several, big, steps, 0.0, [], checkpoint=True)
    found["memory"] = memory(alone, learner) | {"staging_bytes": extra(learner, saving)}
    table, holds = rows(found, several)
    console.print(table)
    if arguments.json_path is not None:
        write_record(arguments.json_path, found, under)
    return 0 if holds else 1


def train(
    ranks: int, model: tuple[int, int], steps: int, pace_s: float, core: list[str] | None, *, checkpoint: bool = False
) -> Ranks:
    """Returns the figures of all ranks of one learner.

    core: options of its core; None: train without a Learner. checkpoint: whether to save one at the middle step.
    """
    with tempfile.TemporaryDirectory() as place, children(Path(place)) as group:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "benchmarks.islands.rank", place, *map(str, (*model, steps, pace_s))]
        if core is not None:
            _, address = group.start_core(Path(place) / "run", "127.0.0.1:0", core)
            command += [address, *(["checkpoint"] if checkpoint else [])]
        subprocess.run(command, check=True, timeout=1800)
        return [json.loads((Path(place) / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def idle(ranks: Ranks) -> dict[str, float]:
    """Returns the slowest rank's seconds per step: calls in a row, and after training steps, which empty the caches.

    The first tenth of the calls warms up.
    """
    row, trained = ([sorted(rank[what][len(rank[what]) // 10 :]) for rank in ranks] for what in ("row_s", "step_s"))
    return {
        "median_s": max(statistics.median(each) for each in row),
        "mean_s": max(statistics.fmean(each) for each in row),
        "trained_median_s": max(statistics.median(each) for each in trained),
        "trained_mean_s": max(statistics.fmean(each) for each in trained),
        "trained_p99_s": max(each[len(each) * 99 // 100] for each in trained),
    }


def blocked(ranks: Ranks) -> dict[str, float]:
    """Returns the slowest rank's share of time in `step`."""
    return {
        "blocked": max(sum(rank["step_s"]) / rank["wall_s"] for rank in ranks),
        "longest_s": max(max(rank["step_s"]) for rank in ranks),
        "merged": ranks[0]["merged"],
    }


def memory(without: Ranks, ranks: Ranks) -> dict[str, float]:
    """Returns bytes: the peak of the largest rank, and its extra memory with its limit."""
    share, tensor = 4 * ranks[0]["parameters"] / len(ranks), 4 * ranks[0]["largest_tensor"]
    before, peak = (max(rank["peak_bytes"] for rank in each) for each in (without, ranks))
    limit = LIMIT_SHARES * share + tensor + LIMIT_BYTES
    return {
        "parameters": ranks[0]["parameters"],
        "without_bytes": before,
        "peak_bytes": peak,
        "joined_bytes": max(rank["joined_bytes"] for rank in ranks),
        "extra_bytes": extra(without, ranks),
        "limit_bytes": limit,
        "share_bytes": share,
        "merged": ranks[0]["merged"],
    }


def extra(without: Ranks, ranks: Ranks) -> float:
    """Returns the bytes that the largest rank needs in addition."""
    return float(max(mine["peak_bytes"] - other["peak_bytes"] for mine, other in zip(ranks, without, strict=True)))


def rows(found: dict[str, dict[str, float]], several: int) -> tuple[Table, bool]:
    """Returns the table, and whether all limits hold."""
    table, holds = Table("measurement", "value", "limit"), True
    for ranks in (1, several):
        each, paced = found[f"idle, {ranks}"], found[f"paced, {ranks}"]
        limit = f"{1e6 * LIMIT_IDLE_S:.0f} us" if ranks == 1 else ""
        holds &= (ranks > 1 or each["median_s"] <= LIMIT_IDLE_S) and paced["blocked"] <= LIMIT_BLOCKED
        table.add_row(f"step() with nothing due, {ranks} ranks, median", f"{1e6 * each['median_s']:.1f} us", limit)
        table.add_row("... mean, with agreements", f"{1e6 * each['mean_s']:.1f} us", "")
        table.add_row("... after training steps, median", f"{1e6 * each['trained_median_s']:.1f} us", "")
        table.add_row("... after training steps, mean", f"{1e6 * each['trained_mean_s']:.1f} us", "")
        share = f"{100 * paced['blocked']:.2f} % ({paced['merged']:.0f} merged)"
        table.add_row(f"blocked with syncs, {ranks} ranks", share, f"{100 * LIMIT_BLOCKED:.0f} %")
    size = found["memory"]
    holds &= size["extra_bytes"] <= size["limit_bytes"]
    table.add_row(
        f"extra memory of the largest of {several} ranks, {size['parameters'] / 1e6:.0f}M parameters",
        f"{size['extra_bytes'] / 1e6:.0f} MB",
        f"{size['limit_bytes'] / 1e6:.0f} MB",
    )
    table.add_row("... for the staging of a checkpoint", f"{size['staging_bytes'] / 1e6:.0f} MB", "")
    return table, holds


if __name__ == "__main__":
    sys.exit(main())
