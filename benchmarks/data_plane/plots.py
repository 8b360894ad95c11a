"""Plots: each figure's margin to its limit, and flame graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.data_plane.rows import Row

HOLDS, MISSED = "#2a9d8f", "#e76f51"
KINDS = {  # of functions, by their file
    "kernels, zstd, checksums": ("#e9c46a", ("codec.py", "combining.py", "places.py", "merge.py", "checksums.py")),
    "disk": ("#8ab17d", ("spool.py", "disk.py", "writer.py", "ledger.py", "database.py", "snapshot.py", "pathlib")),
    "event loop, gRPC, threads": ("#8ecae6", ("asyncio/", "grpc/", "selectors.py", "concurrent/", "threading.py")),
}
OTHER = "#d5bdaf"
LEAST, LETTERS = 0.003, 210.0  # the smallest share that is drawn as a box; letters across the whole width


def margins(rows: Sequence[Row], path: Path) -> None:
    """Plots each row's margin: bars to the right of 1 keep their limit, bars to the left miss it. path: SVG or PNG."""
    rows = [row for row in rows if row.value > 0]
    if not rows:
        return
    factors = [row.limit / row.value if row.most else row.value / row.limit for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(rows) + 1.2), layout="constrained")
    places = range(len(rows), 0, -1)
    axes.barh(places, [f - 1 for f in factors], left=1, color=[HOLDS if row.holds else MISSED for row in rows])
    axes.set_xscale("log")
    axes.set_xlim(min(0.4, *factors) / 1.3, max(2.5, *factors) * 1.6)
    axes.set_yticks(places, [row.name for row in rows])
    axes.axvline(1, color="black", linewidth=1)
    for place, factor, row in zip(places, factors, rows, strict=True):
        left = factor < 1
        text = f" {row.value:.3g} {row.unit} "
        axes.text(factor, place, text, ha="right" if left else "left", va="center", fontsize=7)
    axes.set_xlabel("times within its limit")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


@dataclass(slots=True)
class Node:
    """A function at one place of the stacks. samples: in it and in its callees; above: its callees."""

    samples: int = 0
    above: dict[str, Node] = field(default_factory=dict)


def flame(root: Node, path: Path) -> None:
    """Draws a flame graph: a box is as wide as its share of the samples, above its caller. path: SVG or PNG."""
    figure, axes = plt.subplots(figsize=(16, 7), layout="constrained")
    rows = _row(root, 0)
    depth = max(_boxes(axes, node, name, at / root.samples, root.samples, 0) for name, node, at in rows)
    patches = [Patch(color=colour, label=kind) for kind, (colour, _) in KINDS.items()]
    axes.legend(handles=[*patches, Patch(color=OTHER, label="other Python")], loc="upper right", fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, depth + 1)
    axes.set_xlabel(f"share of {root.samples} samples")
    axes.yaxis.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)


def _row(node: Node, at: int) -> list[tuple[str, Node, int]]:
    """A node's callees, widest first: (name, node, samples to the left of it)."""
    found = []
    for name, one in sorted(node.above.items(), key=lambda item: -item[1].samples):
        found.append((name, one, at))
        at += one.samples
    return found


def _boxes(axes: Axes, node: Node, name: str, left: float, samples: int, level: int) -> int:
    """Draws a node and its callees; returns the highest level."""
    width = node.samples / samples
    if width < LEAST:
        return level
    colour = next((colour for colour, files in KINDS.values() if any(file in name for file in files)), OTHER)
    axes.barh(level + 0.5, width, 0.94, left, color=colour, edgecolor="white", linewidth=0.5)
    share, letters = f" {100 * width:.1f} %", int(width * LETTERS)
    text = name.partition(" (")[0] + share
    if letters > 4:
        axes.text(left + 0.001, level + 0.5, text[:letters], va="center", fontsize=6.5)
    tops = [_boxes(axes, one, label, left + at / samples, samples, level + 1) for label, one, at in _row(node, 0)]
    return max(tops, default=level)
