"""The summary of `atoll chaos`."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

CAUSES = {
    "down": "down: killed and not restarted yet, or paused",
    "restarting": "restarting: interpreter, imports, model, data",
    "joining": "joining: fetching the run's parameters",
    "blocked": "blocked in step()",
    "thrown_away": "work thrown away",
    "other": "other: before the first report, or while leaving",
}


def summary_table(summary: dict[str, Any]) -> Table:
    """Returns the summary as a table. summary: the JSON object of the summary."""
    table = Table("metric", "value", title="atoll chaos")
    kills, counts = summary["kills"], summary["contributions"]
    table.add_row("run", f"{summary['learners']} learners, {summary['seconds']:.0f} s")
    table.add_row("killed", f"{kills['learner']} learners, {kills['core']} cores; {kills['paused']} pauses")
    table.add_row(
        "goodput", f"{summary['goodput']:.4f} of {summary['provisioned_s']:.0f} learner-seconds", style="bold"
    )
    for cause, text in CAUSES.items():
        lost = summary["goodput_lost_s"].get(cause, 0.0)
        table.add_row(f"  lost: {text}", f"{lost:.1f} s, {100 * lost / max(1e-9, summary['provisioned_s']):.2f} %")
    lost = max(0, summary["tokens_trained"] - summary["tokens_merged"])
    share = 100 * lost / max(1, summary["tokens_trained"])
    table.add_row("tokens", f"{summary['tokens_trained']:,} trained, {lost:,} lost ({share:.2f} %)")
    table.add_row("contributions", ", ".join(f"{count} {fate}" for fate, count in counts.items()))
    for name, text in (
        ("prepared_s", "killed learner: process start to Join"),
        ("joining_s", "  ... to the run's parameters"),
        ("first_step_s", "  ... to the end of the first inner step"),
        ("serving_s", "killed core: process start to first answer"),
        ("all_back_s", "  ... to the first report of every learner"),
    ):
        times = [hit[name] for hit in summary["hits"] if name in hit]
        if times:
            table.add_row(text, f"{statistics.median(times):.2f} s median, {max(times):.2f} s maximum")
    if "validation_loss" in summary:
        table.add_row("validation loss", f"{summary['validation_loss']:.4f}")
    return table
