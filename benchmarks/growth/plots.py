"""Plots seconds and CPU seconds against the value that grows, one panel for each curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.growth.point import Point

LINES = {"seconds": "#264653", "CPU seconds of the cores": "#e76f51"}


def curves(points: Sequence[Point], path: Path) -> None:
    """Plots all curves. A dotted line through the first point shows growth in proportion. path: SVG or PNG file."""
    names = list(dict.fromkeys(point.curve for point in points))
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows), layout="constrained", squeeze=False)
    for place, name in zip(axes.flat, names, strict=False):
        mine = [point for point in points if point.curve == name]
        x = [point.x for point in mine]
        for label, color in LINES.items():
            y = [point.wall_s if label == "seconds" else point.core_cpu_s for point in mine]
            place.plot(x, y, marker="o", color=color, label=label)
        if x[0] > 0:
            place.plot(x, [mine[0].core_cpu_s * each / x[0] for each in x], ":", color="grey", label="in proportion")
            place.set_xscale("log", base=2)
        place.set_yscale("log")
        place.set_title(name, fontsize=10)
        place.spines[["top", "right"]].set_visible(False)
    for place in list(axes.flat)[len(names) :]:
        place.set_visible(False)
    axes.flat[0].legend(fontsize=7, frameon=False)
    figure.savefig(path)
    plt.close(figure)
