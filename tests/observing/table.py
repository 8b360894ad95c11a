"""Generates docs/reference/metrics.md from the metrics that the processes declare: python -m tests.observing.table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.core import Metric

from tests.observing.exported import registries

PATH = Path(__file__).parent.parent.parent / "docs/reference/metrics.md"
HEAD = """# Metrics

Each core, front and learner with `--metrics-listen HOST:PORT` serves these metrics at `/metrics`.
[Monitoring](../operate/monitoring.md) shows what to watch.

- A histogram has the series `_bucket`, `_sum` and `_count`.
- `atoll_learner_*` holds the core's observations of a learner. `atoll_local_*` holds the learner's own measurements.
- Each process also exports `process_*`: memory, CPU time and open files.

This page is generated from the code by `make reference`.
"""
UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "ratio",
    "versions": "versions",
    "weight": "ratio",
    "merges": "merges",
    "epoch": "starts",
    "units": "units",
}
WORDS = {
    "front_refused": "calls", "limited": "calls", "steps": "steps", "tokens": "tokens",
    "contributions": "contributions", "rounds": "rounds", "loss": "nats", "version": "version", "learners": "learners",
    "merged": "contributions", "refused": "contributions", "calls": "calls", "pending": "contributions",
    "reconnects": "times", "checkpoints": "checkpoints", "readers": "readers", "units": "units",
    "certificates": "certificates",
}  # fmt: skip


def table() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    for title, registry in registries().items():
        parts += [f"\n## {title}\n\n| name | type | labels | unit | meaning |\n|---|---|---|---|---|\n"]
        parts += _rows(registry.collect())
    return "".join(parts)


def _rows(families: Iterable[Metric]) -> Iterator[str]:
    for family in families:
        if family.name.startswith("atoll_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
            shown = ", ".join(f"`{label}`" for label in labels)
            yield f"| `{name}` | {family.type} | {shown} | {_unit(name)} | {family.documentation} |\n"


def _unit(name: str) -> str:
    if "timestamp" in name:
        return "s since 1970"
    last = name.removesuffix("_total").rpartition("_")[2]
    if last in UNITS:
        return UNITS[last]
    return next((unit for word, unit in WORDS.items() if word in name), "0 or 1")


if __name__ == "__main__":
    PATH.write_text(table())
