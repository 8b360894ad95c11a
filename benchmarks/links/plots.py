"""Plots the seconds of a sync over links of many rates, for Atoll and torchft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ATOLL, TORCHFT = "#2a9d8f", "#e76f51"


class Cell(Protocol):
    """One kind of link, as in `benchmarks.links.__main__`."""

    @property
    def learners(self) -> int: ...
    @property
    def rate_gbit(self) -> float: ...
    @property
    def round_trip_ms(self) -> float: ...
    @property
    def atoll_s(self) -> float: ...
    @property
    def torchft_s(self) -> float: ...
    @property
    def measured(self) -> bool: ...


def crossings(cells: Sequence[Cell], crossing_gbit: Mapping[int, float | None], path: Path) -> None:
    """Plots seconds over the rate, for the shortest and the longest round trip. path: SVG.

    crossing_gbit: the rate above which torchft is faster, by number of learners; None if Atoll is always faster.
    """
    mpl.rcParams["svg.hashsalt"] = "atoll"  # the same records give the same file
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    panels = figure.subplots(1, len(crossing_gbit), sharey=True, squeeze=False)[0]
    longest = max(cell.round_trip_ms for cell in cells)
    for axes, (learners, crossing) in zip(panels, crossing_gbit.items(), strict=True):
        mine = [cell for cell in cells if cell.learners == learners]
        _lines(axes, [cell for cell in mine if cell.round_trip_ms <= 1.0], "-", "at most 1 ms")
        _lines(axes, [cell for cell in mine if cell.round_trip_ms == longest], ":", f"{longest:g} ms")
        if crossing is not None:
            axes.axvline(crossing, color="grey", linewidth=0.8)
        said = "at all rates" if crossing is None else f"up to {crossing:.2g} Gbit/s"
        axes.set_title(f"{learners} learners: Atoll is faster {said}", fontsize=10)
        axes.set_xscale("log")
        axes.set_yscale("log")
        rates = sorted({cell.rate_gbit for cell in mine})
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set_xlabel("rate of each learner's link, Gbit/s")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds per sync of 124M parameters")
    panels[0].legend(frameon=False, fontsize=8, title="hollow: modelled", title_fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _lines(axes: Axes, cells: Sequence[Cell], style: str, trip: str) -> None:
    ordered = sorted(cells, key=lambda cell: cell.rate_gbit)
    rates = [cell.rate_gbit for cell in ordered]
    for name, colour, seconds in (
        ("Atoll", ATOLL, [cell.atoll_s for cell in ordered]),
        ("torchft", TORCHFT, [cell.torchft_s for cell in ordered]),
    ):
        axes.plot(rates, seconds, style, color=colour, label=f"{name}, round trip {trip}")
        for cell, rate, value in zip(ordered, rates, seconds, strict=True):
            axes.plot([rate], [value], "o", color=colour, mfc=colour if cell.measured else "white", markersize=5)
