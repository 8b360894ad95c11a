"""The table of metrics matches the metrics in the code."""

from __future__ import annotations

from tests.observing.table import PATH, table


def test_the_documented_table_matches_the_metrics():
    assert PATH.read_text() == table(), "out of date: run `python -m tests.observing.table`"


def test_every_metric_has_a_unit_and_a_meaning():
    rows = [line.split(" | ") for line in table().splitlines() if line.startswith("| `")]
    assert len(rows) > 55
    for name, kind, _, unit, meaning in rows:
        assert kind in {"gauge", "counter", "histogram"}, name
        assert unit, name
        assert len(meaning.strip(" |")) > 6, name
