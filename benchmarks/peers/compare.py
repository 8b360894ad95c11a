"""Rows that compare Atoll's outer sync with Flower's and hivemind's, in wall-clock time and CPU time."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.data_plane.rows import Report, Row
from benchmarks.data_plane.sync import Measured
from benchmarks.peers import flower_sync, hivemind_sync
from benchmarks.peers.sync_cost import PeerSync

SYNCS = 2
PEERS: dict[str, Callable[[Measured, str], PeerSync]] = {
    "Flower": lambda mine, _: flower_sync.measure(flower_sync.install(), mine.learners, mine.parameters, SYNCS),
    "hivemind": lambda mine, size: hivemind_sync.measure(hivemind_sync.install(), mine.learners, size, SYNCS),
}


def add(report: Report, mine: Measured, size: str) -> None:
    """Measures each peer with the same numbers of workers and parameters. The report lists peers that failed."""
    for name, measure in PEERS.items():
        try:
            report.rows += rows(name, size, mine, measure(mine, size))
        except SystemExit as error:
            report.not_measured.append({"name": f"vs. {name}", "reason": str(error)})


def rows(peer: str, size: str, mine: Measured, theirs: PeerSync) -> list[Row]:
    """Returns the rows of one peer. size: the model's size, a key of SIZES."""
    name = f"outer sync of {size.upper()}, {mine.learners} learners"
    wall, cpu = mine.median(lambda sync: sync.wall_s), mine.median(lambda sync: sync.cpu_s)
    wire = theirs.median_bytes / mine.learners / mine.parameters
    told = f"{wall:.2f} s vs. {theirs.median_wall_s:.2f} s"
    told += f"; {mine.bytes_per_parameter:.2f} vs. {wire:.2f} bytes of loopback per parameter per learner"
    if theirs.server_bytes:
        told += f"; server's peak {mine.core_bytes / 1e9:.2f} vs. {theirs.server_bytes / 1e9:.2f} GB"
    spent = f"{cpu:.2f} s vs. {theirs.median_cpu_s:.2f} s"
    return [
        Row(f"{name}: wall-clock vs. {peer}", wall / theirs.median_wall_s, 1.0, f"x {peer}", told),
        Row(f"{name}: CPU time vs. {peer}", cpu / theirs.median_cpu_s, 1.0, f"x {peer}", spent),
    ]
