"""Plots of the quality report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.quality.grid import Group
from benchmarks.quality.presets import FINDING, KINDS, METHODS, curves
from benchmarks.quality.records import Records
from benchmarks.quality.report import Gap, Line

COLOURS = ("#2a9d8f", "#e76f51", "#264653", "#e9c46a")


def gaps(found: Sequence[Gap], path: Path) -> None:
    """Plots the loss, in percent above data-parallel training, over tokens. Each size has a curve through its means.

    Each seed has a point. A second panel is over tokens per parameter, which is comparable between model sizes.
    path: the SVG file.
    """
    mpl.rcParams["svg.hashsalt"] = "atoll"  # the same records give the same file
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for size, colour in zip(dict.fromkeys(gap.budget.size for gap in found), COLOURS, strict=False):
        of_size = [gap for gap in found if gap.budget.size == size]
        means = [statistics.mean(gap.behind) for gap in of_size]
        for axes, parameters in zip(panels, (1, 1000 * int(size.removesuffix("k"))), strict=True):
            tokens = [gap.fleet.tokens / parameters for gap in of_size]
            axes.plot(tokens, means, "-", color=colour, label=f"{size} parameters")
            for at, gap in zip(tokens, of_size, strict=True):
                axes.plot([at] * len(gap.behind), gap.behind, "o", color=colour, alpha=0.6)
    for axes, label in zip(panels, ("tokens of the whole run", "tokens of the whole run, per parameter"), strict=True):
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("The gap to data-parallel training closes with the number of tokens", fontsize=11)
    panels[0].set_ylabel("loss, % above data-parallel")
    panels[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def losses(group: Group, lines: Sequence[Line], path: Path) -> None:
    """Plots the loss, in percent above the first variant, with a row per variant and a point per seed.

    path: the SVG file.
    """
    mpl.rcParams["svg.hashsalt"] = "atoll"  # the same records give the same file
    figure = Figure(figsize=(8, 0.45 * len(lines) + 1.1), layout="constrained")
    axes = figure.subplots()
    for place, line in enumerate(reversed(lines)):
        axes.plot(line.behind, [place] * len(line.behind), "o", color="#2a9d8f", alpha=0.6)
        if line.behind:
            axes.plot(sum(line.behind) / len(line.behind), place, "|", color="black", markersize=16)
    figure.suptitle(group.finding, fontsize=10)
    axes.set_yticks(range(len(lines)), [line.variant.name for line in reversed(lines)])
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"loss, % above {group.variants[0].name}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def presets(records: Records, path: Path) -> None:
    """Plots the loss of fine-tuning, in percent above one process, over steps. A panel per kind of fine-tuning.

    path: the SVG file.
    """
    mpl.rcParams["svg.hashsalt"] = "atoll"  # the same records give the same file
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    measured = set[int]()
    for (kind, title), axes in zip(KINDS.items(), panels, strict=True):
        for method, steps, means in curves(kind, records):
            axes.plot(steps, means, "o-", color=f"C{list(METHODS).index(method)}", label=method)
            measured.update(steps)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log")
        axes.set_xticks(sorted(measured), map(str, sorted(measured)))
        axes.minorticks_off()
        axes.set_xlabel("inner steps per learner")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(FINDING, fontsize=11)
    panels[0].set_ylabel("loss, % above one process")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
