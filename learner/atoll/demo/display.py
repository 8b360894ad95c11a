"""Output of the demo: live progress and the summary."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from atoll_wire import outer_pb2 as pb
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_S = 10.0  # seconds between two progress lines if the output is not a terminal


class Progress:
    """Shows a live table on a terminal. On other outputs, it prints a line every PLAIN_EVERY_S seconds.

    total_tokens: the run's token target.
    """

    def __init__(self, console: Console, total_tokens: int) -> None:
        self._console = console
        self._total = total_tokens
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._began = time.monotonic()
        self._said_at = 0.0
        self._notes: list[str] = []

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Shows a line with the elapsed seconds. The line stays on the screen."""
        line = f"[{time.monotonic() - self._began:5.0f} s] {text}"
        self._notes.append(line)
        if self._live is None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(self, status: pb.StatusReply) -> None:
        """Shows the run's state. Without a terminal, it prints at most once every PLAIN_EVERY_S seconds."""
        if self._live is not None:
            self._live.update(Group(self._line(status), _learners(status), Text("\n".join(self._notes))))
        elif time.monotonic() - self._said_at >= PLAIN_EVERY_S:
            self._said_at = time.monotonic()
            self._console.print(self._line(status), highlight=False, soft_wrap=True)

    def _line(self, status: pb.StatusReply) -> Text:
        losses = [each.loss for each in status.learners if each.loss == each.loss]
        loss = f"{sum(losses) / len(losses):.3f}" if losses else "-"
        versions = [each.version for each in status.fragments] or [0]
        return Text(
            f"[{time.monotonic() - self._began:5.0f} s] {100 * status.tokens_trained / self._total:3.0f} % of "
            f"{self._total / 1e6:.1f}M tokens  loss {loss}  versions {min(versions)} to {max(versions)}  "
            f"goodput {status.goodput.ratio:.3f}  "
            f"up {status.wire.up / 1e6:.1f} MB  down {status.wire.down / 1e6:.1f} MB"
        )


def _learners(status: pb.StatusReply) -> Table:
    table = Table("learner", "state", "steps", "loss", "s/step", "goodput", "tokens", "last seen", box=None)
    for each in status.learners:
        table.add_row(
            each.learner,
            each.state,
            str(each.steps),
            f"{each.loss:.3f}",
            f"{each.step_time_s:.3f}",
            f"{each.goodput.ratio:.3f}",
            f"{each.tokens:,}",
            f"{each.last_seen_age_s:.1f} s ago",
        )
    return table


def summary_table(summary: dict[str, Any], solo: float | None) -> Table:
    """Returns the summary as a table. summary: the JSON object of the summary. solo: validation loss without Atoll, or
    None."""
    table = Table("metric", "value", title="atoll demo")
    loss, contributions = summary["validation_loss"], summary["contributions"]
    fall = 100 * (1 - loss["last"] / loss["first"])
    table.add_row("model", f"{summary['parameters']:,} parameters on {summary['learners']} learners")
    table.add_row("validation loss", f"{loss['first']:.3f} -> {loss['last']:.3f} ({fall:.0f} % lower)")
    if solo is not None:
        table.add_row("validation loss without Atoll, on as many tokens as the busiest learner", f"{solo:.3f}")
    kills = {
        what: count for what, count in summary["kills"].items() if what != "core" or "shard" not in summary["kills"]
    }
    table.add_row("killed during training", ", ".join(f"{count} {what}" for what, count in kills.items()))
    table.add_row("goodput", f"{summary['goodput']:.3f}")
    table.add_row("blocked in step(), worst learner", f"{100 * summary['learner_blocked_fraction']:.2f} %")
    merged = summary["tokens_merged"] / max(1, summary["tokens_trained"])
    table.add_row("tokens", f"{summary['tokens_trained']:,} trained, {100 * merged:.1f} % merged")
    table.add_row("merges", f"{summary['merges']:,}")
    table.add_row("contributions", ", ".join(f"{count} {fate}" for fate, count in contributions.items()))
    bits, size = summary["wire_bits_per_parameter"], summary["wire_bytes"]
    table.add_row("contributions sent", f"{bits['up']:.2f} bits per parameter per sync, {size['up'] / 1e6:.1f} MB")
    table.add_row("updates received", f"{bits['down']:.2f} bits per parameter per sync, {size['down'] / 1e6:.1f} MB")
    table.add_row("whole fragments, both ways", f"{summary['whole_bytes'] / 1e6:.1f} MB")
    for name, moved in summary.get("regions", {}).items():
        table.add_row(
            f"WAN traffic of {name}",
            f"payloads: {moved['contribution_bytes'] / 1e6:.1f} MB up, {moved['update_bytes'] / 1e6:.1f} MB of updates "
            f"and {moved['whole_bytes'] / 1e6:.1f} MB of whole fragments down. "
            f"All bytes: {moved['link_up_bytes'] / 1e6:.1f} MB up, {moved['link_down_bytes'] / 1e6:.1f} MB down",
        )
    table.add_row("duration", f"{summary['seconds']:.0f} s")
    return table
