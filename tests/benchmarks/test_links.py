"""The comparison over links: which cells are measured or modelled, and where torchft becomes faster."""

from __future__ import annotations

from benchmarks.conditions import write_record
from benchmarks.links.__main__ import Cell, crossing_gbit, data, modelled, read, wanted

QUICK = [Cell(2, 1.0, 0.0, 2.0, 8.0), Cell(2, 3.0, 0.0, 2.0, 4.0), Cell(2, 10.0, 0.0, 2.0, 1.0)]
SLOW = [
    Cell(2, 0.3, 1.0, 4.0, 20.0), Cell(2, 0.3, 20.0, 4.5, 21.0), Cell(2, 0.3, 80.0, 5.0, 26.0),
    Cell(2, 0.3, 160.0, 6.0, 32.0),
]  # fmt: skip


def test_a_delay_at_a_high_rate_adds_what_it_added_at_a_low_rate():
    found = {cell.key: cell for cell in modelled([*QUICK, *SLOW])}
    assert set(found) == {(2, rate, trip) for rate in (1.0, 3.0, 10.0) for trip in (20.0, 80.0, 160.0)}
    assert (found[2, 10.0, 160.0].atoll_s, found[2, 10.0, 160.0].torchft_s) == (4.0, 13.0)
    assert not any(cell.measured for cell in found.values())


def test_without_measured_delays_no_cell_is_modelled():
    assert modelled(QUICK) == []
    assert modelled(SLOW) == []


def test_the_crossing_lies_between_the_rates_at_which_the_faster_system_changes():
    rate = crossing_gbit([*QUICK, *SLOW], 2)
    assert rate is not None
    assert abs(rate - 30**0.5) < 1e-9, "ratios 0.5 at 3 Gbit/s and 2 at 10 Gbit/s: the middle, on logarithmic axes"
    assert crossing_gbit(QUICK[:2], 2) is None


def test_only_fast_links_with_short_round_trips_have_no_target():
    every = [*QUICK, *SLOW, *modelled([*QUICK, *SLOW])]
    assert [cell.key for cell in every if not cell.has_target] == [(2, 10.0, 0.0)]
    rows = data(every)["rows"]
    assert len(rows) == len(every) - 1
    assert [row["name"] for row in rows if not row["holds"]] == ["2 learners, 10 Gbit/s, round trip 20 ms"]


def test_a_file_keeps_the_cells_that_its_commit_measured(tmp_path):
    path = tmp_path / "links.json"
    assert read(path, "one") == {}
    write_record(path, data([*QUICK, *modelled([*QUICK, *SLOW])]), {"commit": "one"})
    assert read(path, "one") == {cell.key: cell for cell in QUICK}
    assert read(path, "other") == {}, "the record names only one commit"


def test_slow_links_are_measured_with_every_round_trip_and_fast_ones_without_delay():
    assert list(wanted([10.0, 0.1], [4])) == [
        (4, 10.0, 0.0), (4, 0.1, 1.0), (4, 0.1, 20.0), (4, 0.1, 80.0), (4, 0.1, 160.0),
    ]  # fmt: skip
