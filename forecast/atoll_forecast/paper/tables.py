"""The paper's figures and ours, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll_wire.cli.output import plain_table
from rich.table import Table

from atoll_forecast.paper import figures
from atoll_forecast.paper.claims import Claim

NAMES = {"dp": "data-parallel, not elastic", "elastic": "data-parallel, elastic"}


def goodput_table(ours: dict[str, list[float]], failures_per_year: float, difference: float) -> Table:
    """Returns Table 1 in percent. Each cell contains our value and the paper's. difference: RMSE in points."""
    title = (
        f"Goodput in percent, by chips, {failures_per_year:g} failures per chip per year: "
        f"ours (paper's); RMSE {difference:.2f} points"
    )
    table = plain_table(title=title)
    table.add_column("")
    for chips in figures.CHIPS:
        table.add_column(f"{chips:,}", justify="right")
    for name, row in ours.items():
        cells = [f"{mine:.0f} ({theirs})" for mine, theirs in zip(row, figures.GOODPUT[name], strict=True)]
        table.add_row(NAMES.get(name, f"Decoupled, M = {name}"), *cells)
    return table


def claims_table(title: str, claims: Sequence[Claim]) -> Table:
    """Returns a table with one row per claim: our value, the paper's, and the unit."""
    table = plain_table(title=title)
    for column, side in (("", "left"), ("ours", "right"), ("paper", "right"), ("", "left"), ("of what", "left")):
        table.add_column(column, justify="right" if side == "right" else "left")
    for claim in claims:
        theirs = "" if claim.theirs is None else f"{claim.theirs:.3g}"
        table.add_row(claim.name, f"{claim.ours:.3g}", theirs, claim.unit, claim.how)
    return table


def claims_json(claims: Sequence[Claim]) -> list[dict[str, Any]]:
    """Returns the claims as JSON values."""
    return [{"name": c.name, "ours": c.ours, "paper": c.theirs, "unit": c.unit, "of": c.how} for c in claims]
