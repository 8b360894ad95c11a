"""Report rows, their plot, and the emulated link that other figures depend on."""

from __future__ import annotations

import random

import pytest

from benchmarks.data_plane.plots import margins
from benchmarks.data_plane.rows import Report, Row
from benchmarks.links.emulator import BUFFER_S, Way

PACKET = bytes(1500)


@pytest.mark.parametrize(("value", "most", "holds"), [(1.0, True, True), (1.1, True, False), (0.9, False, False)])
def test_a_row_states_whether_its_limit_holds(value, most, holds):
    assert Row("a", value, 1.0, "x", most=most).holds is holds


def test_a_report_lists_missing_measurements_and_has_a_picture(tmp_path):
    report = Report([Row("fast", 2.0, 1.0, "x", most=False), Row("large", 2.0, 1.0, "x")])
    report.not_measured.append({"name": "far", "reason": "needs root"})
    report.paces_s["kernels"] = 0.5
    data = report.data()
    assert [row["holds"] for row in data["rows"]] == [True, False]
    assert data["not_measured"] == [{"name": "far", "reason": "needs root"}]
    assert data["paces_s"] == {"kernels": 0.5}
    margins(report.rows, tmp_path / "rows.svg")
    assert b"</svg>" in (tmp_path / "rows.svg").read_bytes()


def way(loss: float = 0.0) -> Way:
    return Way(bytes_per_s=1.5e6, delay_s=0.04, loss=loss, rng=random.Random(7))


def test_a_link_delays_and_paces_packets():
    link = way()
    for _ in range(10):
        link.send(PACKET, now=100.0)
    assert link.next_at() == pytest.approx(100.041)
    assert not link.arrived(100.0409)
    assert len(link.arrived(100.0411)) == 1
    assert len(link.arrived(100.0501)) == 9
    assert link.carried == 10 * len(PACKET)


def test_a_link_drops_packets_in_a_full_queue_and_by_chance():
    full = way()
    for _ in range(1000):
        full.send(PACKET, now=0.0)
    assert len(full.arrived(60.0)) == pytest.approx(BUFFER_S * 1000, abs=2)
    lossy, sent = way(loss=0.05), 20_000
    for number in range(sent):
        lossy.send(PACKET, now=float(number))
    assert 1 - len(lossy.arrived(1e9)) / sent == pytest.approx(0.05, abs=0.01)
