"""Pictures of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.quality.grid import Group
from benchmarks.quality.report import Line


def losses(group: Group, lines: Sequence[Line], path: Path) -> None:
    """A row for each variant: a point for each seed, percent above the first variant."""
    mpl.rcParams["svg.hashsalt"] = "atoll"  # the same records give the same file
    figure = Figure(figsize=(8, 0.45 * len(lines) + 1.1), layout="constrained")
    axes = figure.subplots()
    for place, line in enumerate(reversed(lines)):
        axes.plot(line.behind, [place] * len(line.behind), "o", color="#2a9d8f", alpha=0.6)
        if line.behind:
            axes.plot(sum(line.behind) / len(line.behind), place, "|", color="black", markersize=16)
    axes.set_yticks(range(len(lines)), [line.variant.name for line in reversed(lines)])
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"loss, % above {group.variants[0].name}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
