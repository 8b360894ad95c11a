"""`make bench`: measures the data plane, and compares it with other systems. ARGS="--json PATH --only kernels"."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch
from atoll.agent.thread import Agent
from atoll.demo.processes import DemoError
from atoll.fragments.adoption import Fate, PreparedAnchor
from atoll.learner import Learner
from atoll.model.parameters import Parameters
from atoll.ranks.division import undivided
from atoll.ranks.rank_group import ALONE
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.layout.layout import plan
from rich.console import Console
from rich.table import Table

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane import idle_learners, kernels, plots, sync
from benchmarks.data_plane.rows import Report, Row, pace_s
from benchmarks.links import wan
from benchmarks.peers import compare as peers
from benchmarks.peers import torchft_sync
from benchmarks.training_loop import throughput

SYNCS = {2: 7, 4: 5}
WITH_ALL_PEERS = 2
WALL, CPU = {2: 1.0, 4: 0.8}, {2: 1.0, 4: 0.75}  # of torchft's, by number of learners
STEPS = 5000


def of_kernels(report: Report) -> None:
    """Measures the codec and the merge on one CPU."""
    report.rows += kernels.rows()


def of_syncs(report: Report) -> None:
    """Measures one outer sync, and compares it with torchft's, Flower's and hivemind's."""
    python = torchft_sync.install()
    for learners, syncs in SYNCS.items():
        before = torchft_sync.measure(python, learners, "124m", (syncs + 1) // 2)
        mine = sync.measure(learners, "124m", syncs)
        peer = before.and_then(
            torchft_sync.measure(python, learners, "124m", syncs // 2)
        )  # before and after Atoll's syncs, because the machine's speed changes
        wall, cpu = mine.median(lambda s: s.wall_s), mine.median(lambda s: s.cpu_s)
        name = f"outer sync of 124M, {learners} learners"
        spread = f"{min(s.wall_s for s in mine.syncs):.2f} to {max(s.wall_s for s in mine.syncs):.2f} s"
        beside = f"{wall:.2f} s ({spread}) vs. {peer.median_wall_s:.2f} s"
        report.rows.append(Row(f"{name}: wall-clock", wall / peer.median_wall_s, WALL[learners], "x torchft", beside))
        beside = f"{cpu:.2f} s vs. {peer.median_cpu_s:.2f} s"
        report.rows.append(Row(f"{name}: CPU time", cpu / peer.median_cpu_s, CPU[learners], "x torchft", beside))
        if learners == WITH_ALL_PEERS:
            peers.add(report, mine, "124m")
    model = 4 * mine.parameters
    wire = sync.measure(2, "124m", 1, compression="always").bytes_per_parameter
    told = f"torchft 4 to 6; on loopback, without compression, {mine.bytes_per_parameter:.2f}"
    report.rows.append(Row("on a WAN, both ways", wire, 0.85, "bytes per parameter per learner", told))
    most = 3.3 + 150e6 / model
    beside = f"{mine.core_bytes / 1e6:.0f} MB; the limit is 3.3 x plus 150 MB"
    report.rows.append(Row("core's peak memory, 4 learners", mine.core_bytes / model, most, "x float32 model", beside))
    report.rows.append(Row("learner's extra memory", mine.learner_bytes / model, 1.6, "x float32 model"))


def of_step(report: Report) -> None:
    """Measures `Learner.step()` when no round is due and no update waits to be adopted."""
    model = torch.nn.Linear(2, 2)
    learner = idle_learner(model, torch.optim.SGD(model.parameters(), 0.1))
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        learner.step(tokens=1)
        times.append(time.perf_counter() - began)
    beside = f"99 % below {statistics.quantiles(times, n=100)[98] * 1e6:.1f}"
    report.rows.append(Row("step() with nothing due", statistics.median(times) * 1e6, 20.0, "microseconds", beside))


def idle_learner(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Learner:
    """Returns a learner that has entered a run, with an agent that does nothing."""

    class Idle:
        failure, run_codec = None, Codec.INT4

        def submit(self, _: object) -> None:
            raise AssertionError("no round is due")

    learner, agent = Learner(model, optimizer, server="127.0.0.1:1", name="a"), cast("Agent", Idle())
    learner._ranks, learner._agent = ALONE, agent
    parameters = learner._parameters = Parameters(model, optimizer)
    layout = plan(parameters.tensors, 0)
    zeros = (np.zeros(fragment.length, np.float32) for fragment in layout.fragments)
    anchors = [PreparedAnchor(number, 1, anchor, Fate()) for number, anchor in enumerate(zeros)]
    learner._take_over(parameters, layout, agent, undivided(layout), anchors)
    return learner


def of_throughput(report: Report) -> None:
    """Measures the throughput of a learner that trains while it syncs."""
    found = throughput.measure()
    spread = f"{min(found.ratios):.3f} to {max(found.ratios):.3f} at {1 / found.step_s:.2f} steps/s"
    told = f"{spread}, {found.merged:.0f} of {throughput.FRAGMENTS} fragments merged in {throughput.INNER_STEPS} steps"
    ratio = statistics.median(found.ratios)
    report.rows.append(Row("learner's throughput with syncs on", ratio, 0.98, "x without", told, most=False))


def of_crowd(report: Report) -> None:
    """Measures a core's CPU time and memory with 1,000 idle learners."""
    found = idle_learners.measure()
    name = f"{found.learners} idle learners"
    spread = f"{min(found.cpus):.2f} to {max(found.cpus):.2f}"
    report.rows.append(Row(f"{name}: CPU", found.cpu, 0.5, "CPUs", spread))
    report.rows.append(Row(f"{name}: memory", found.bytes_each / 1e3, 100.0, "kB per learner"))


def of_wan(report: Report) -> None:
    """Measures the upload rate over a long link that loses packets."""
    name = "upload over 200 Mbit/s, 40 ms, 0.05 % loss"
    if os.geteuid() != 0:
        report.not_measured.append({"name": name, "reason": "network namespaces need root"})
        return
    for learners in wan.LEARNERS:
        for congestion in wan.CONTROLS:
            rates = wan.measure(congestion, learners)
            raw = ", ".join(f"{count}: {rate:.0f}" for count, rate in rates.raw.items())
            beside = (
                f"{rates.median():.0f} vs. {statistics.median(rates.bursts):.0f} Mbit/s; raw TCP without pauses {raw}; "
                f"over a fast link {rates.quick:.0f}"
            )
            who = f"{learners} learners behind a front, " if learners > 1 else ""
            unit = f"of {wan.BURST_CONNECTIONS} raw connections"
            report.rows.append(Row(f"{name}, {who}{congestion}", rates.share(), 0.9, unit, beside, most=False))


PARTS: dict[str, Callable[[Report], None]] = {
    "kernels": of_kernels,
    "step": of_step,
    "syncs": of_syncs,
    "throughput": of_throughput,
    "crowd": of_crowd,
    "wan": of_wan,
}


def main() -> None:
    """Measures, prints a table, and writes the rows as JSON and as a plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, dest="json_path")
    parser.add_argument(
        "--plot", type=Path, default=Path("build/bench.svg"), help="write a plot of the rows to this file"
    )
    parser.add_argument("--only", choices=tuple(PARTS))
    arguments, under = parser.parse_args(), conditions()
    console, report = Console(), Report()
    for name, part in PARTS.items():
        if arguments.only in {None, name}:
            report.paces_s[name] = pace_s()
            console.print(f"measuring: {part.__doc__} (this machine's pace: {report.paces_s[name]:.2f} s)")
            try:
                part(report)
            except subprocess.CalledProcessError as error:
                report.not_measured.append(
                    {"name": name, "reason": f"{error.cmd[0]} ended with status {error.returncode}"}
                )
            except (DemoError, SystemExit) as error:  # a process failed, or the conditions for this part were not met
                report.not_measured.append({"name": name, "reason": str(error)})
            if arguments.json_path is not None:
                write_record(arguments.json_path, report.data(), under)  # after each part, in case a later one fails
    table = Table("what", "value", "limit", "unit", "context", "")
    for row in report.rows:
        limit = f"{'<=' if row.most else '>='} {row.limit:.3g}"
        table.add_row(row.name, f"{row.value:.3g}", limit, row.unit, row.beside, "holds" if row.holds else "MISSED")
    console.print(table)
    for missing in report.not_measured:
        console.print(f"not measured: {missing['name']}: {missing['reason']}")
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    plots.margins(report.rows, arguments.plot)


if __name__ == "__main__":
    main()
