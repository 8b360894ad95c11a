"""Plots the twenty-fold comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.narrow_links.pace import PAPER_STEP_S


def curve(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Plots each method's utilisation over the link rate, and the ratio of tokens/s at each rate. path: SVG."""
    mpl.rcParams["svg.hashsalt"] = "atoll"  # the same records give the same file
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for method, colour in (("Atoll", "#2a9d8f"), ("data-parallel", "#e76f51")):
        mine = sorted((run["gbit"], run["utilisation"]) for run in runs if run["method"] == method)
        axes.plot([gbit for gbit, _ in mine], [100 * share for _, share in mine], "o-", color=colour, label=method)
    rates = sorted({run["gbit"] for run in runs})
    for gbit in rates:
        tokens = {run["method"]: run["tokens_s"] for run in runs if run["gbit"] == gbit}
        if len(tokens) == 2:
            text = f"x {tokens['Atoll'] / tokens['data-parallel']:.3g}"
            axes.annotate(text, (gbit, 75), ha="center", fontsize=9)
    figure.suptitle(_finding(runs), fontsize=11)
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{gbit:g}" for gbit in rates])
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.set_xlabel("link of each region, Gbit/s, for 12B parameters and steps of 3 s")
    axes.set_ylabel("utilisation, %")
    # Only bits and compute count, because delays are a hundredth of a step. Longer steps are equivalent to faster
    # links.
    scale = (lambda gbit: PAPER_STEP_S * gbit / 2, lambda seconds: 2 * seconds / PAPER_STEP_S)
    steps = axes.secondary_xaxis("top", functions=scale)
    steps.set_xticks([scale[0](gbit) for gbit in rates], [f"{scale[0](gbit):.3g}" for gbit in rates])
    steps.minorticks_off()
    steps.set_xlabel("equivalent step time at 2 Gbit/s, s")
    axes.spines["right"].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def _finding(runs: Sequence[dict[str, Any]]) -> str:
    """Returns a sentence with the range of each method's utilisation."""
    shares = {
        name: [run["utilisation"] for run in runs if run["method"] == name] for name in ("Atoll", "data-parallel")
    }
    said = [f"{name} {min(found):.1%} to {max(found):.1%}" for name, found in shares.items() if found]
    return f"Utilisation on narrow links: {', '.join(said)}"
