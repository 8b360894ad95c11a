"""Plots each figure's margin to its limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.data_plane.rows import Row

HOLDS, MISSED = "#2a9d8f", "#e76f51"


def margins(rows: Sequence[Row], path: Path) -> None:
    """Plots each row's margin.

    A bar to the right of 1 is within the limit, and a bar to the left is not. path: the SVG or PNG file.
    """
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
    axes.set_title(
        f"{sum(row.holds for row in rows)} of {len(rows)} figures meet their limits", loc="left", fontsize=10
    )
    axes.set_xlabel("margin to the limit, as a ratio; above 1: limit met")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
