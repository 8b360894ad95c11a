"""Plots of simulated figures next to the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from atoll_forecast.paper import figures
from atoll_forecast.paper.claims import Claim
from atoll_forecast.paper.tables import NAMES

OURS, THEIRS = "#2a9d8f", "#264653"


def goodput(ours: dict[str, list[float]], path: Path) -> None:
    """Plots Table 1. Lines show our figures, points the paper's. path: the SVG or PNG file."""
    mpl.rcParams["svg.hashsalt"] = "atoll"  # the same figures give the same file
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, (name, row) in enumerate(ours.items()):
        colour = f"C{number}"
        axes.plot(figures.CHIPS, row, color=colour, label=NAMES.get(name, f"Decoupled, M = {name}"))
        axes.plot(figures.CHIPS, figures.GOODPUT[name], "o", color=colour)
    axes.set_xscale("log")
    axes.set_xticks(figures.CHIPS, [f"{chips / 1000:,.0f}k" for chips in figures.CHIPS], minor=False)
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_xlabel("number of chips, with one failure per chip per year")
    axes.set_ylabel("goodput, % (lines: ours; points: the paper's)")
    axes.set_title(_finding(ours), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _finding(ours: dict[str, list[float]]) -> str:
    """Returns a sentence with the lowest and the highest goodput at the fourth number of chips, 1.2 million."""
    most, place = max((name for name in ours if name.isdecimal()), key=int), 3
    return (
        f"At 1.2M chips, goodput is {ours[most][place]:.0f} % with {most} learners, "
        f"and {ours['dp'][place]:.0f} % with data-parallel training"
    )


def claims(finding: str, rows: Sequence[Claim], path: Path) -> None:
    """Plots two bars per claim: our figure and the paper's. finding: the title. path: the SVG or PNG file."""
    mpl.rcParams["svg.hashsalt"] = "atoll"
    figure = Figure(figsize=(8, 0.55 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        axes.barh(place + 0.2, row.ours, 0.36, color=OURS, label="ours" if not place else None)
        axes.text(row.ours, place + 0.2, f" {row.ours:.3g}", va="center", fontsize=8)
        if row.theirs is not None:
            first = not any(other.theirs is not None for other in list(reversed(rows))[:place])
            axes.barh(place - 0.2, row.theirs, 0.36, color=THEIRS, label="paper" if first else None)
            axes.text(row.theirs, place - 0.2, f" {row.theirs:.3g}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
    values = [value for row in rows for value in (row.ours, row.theirs) if value]
    if max(values) > 50 * min(values):
        axes.set_xscale("log")
    axes.set_xlabel(rows[0].unit)
    figure.suptitle(finding, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
