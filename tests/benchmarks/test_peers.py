"""The costs of peers, and the report rows made from them. No peer runs in these tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.data_plane.rows import Report
from benchmarks.data_plane.sync import Measured, Sync
from benchmarks.peers import compare
from benchmarks.peers.environment import install, last_error
from benchmarks.peers.sync_cost import CostSoFar, PeerSync, below, between

MINE = Measured(2, 1000, [Sync(0.0, 1.0, 2.0, 0.5, 0.0, 1600)], 12_000, 10_000)
THEIRS = PeerSync([4.0, 2.0, 3.0], [8.0, 8.0, 8.0], [16_000, 16_000, 16_000], 90_000)


def test_an_ended_child_counts_with_its_parent():
    burn = "import time\nwhile time.process_time() < 0.1: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert below(os.getpid()) >= 0.05, "must be near 0.1 s; the system rounds down to ticks"
        assert below(child.pid) == 0.0, "the child itself has no children"
        child.communicate(b"\n")


def test_costs_of_a_sync_are_differences_of_neighbours():
    assert between([CostSoFar(1.0, 2.0, 3), CostSoFar(2.0, 4.0, 6), CostSoFar(4.0, 5.0, 6)]) == (
        [1.0, 2.0],
        [2.0, 1.0],
        [3, 0],
    )


def test_two_measurements_merge_into_one():
    both = THEIRS.and_then(PeerSync([9.0], [1.0], [4], 100_000))
    assert (both.wall_s, both.cpu_s[-1], both.wire_bytes[-1]) == ([4.0, 2.0, 3.0, 9.0], 1.0, 4)
    assert both.server_bytes == 100_000


def test_rows_compare_the_medians():
    wall, cpu = compare.rows("Flower", "124m", MINE, THEIRS)
    assert wall.name == "outer sync of 124M, 2 learners: wall-clock vs. Flower"
    assert (wall.value, cpu.value, wall.unit, wall.holds) == (1 / 3, 0.25, "x Flower", True)
    assert "0.80 vs. 8.00 bytes" in wall.beside
    assert "server's peak" in wall.beside
    assert "server's" not in compare.rows("hivemind", "124m", MINE, PeerSync([1.0], [1.0], [1]))[0].beside


def test_a_failing_peer_is_listed_with_its_reason_and_the_next_is_measured(monkeypatch):
    def fail(*_):
        raise SystemExit("pip failed: no such package")

    monkeypatch.setattr(compare, "PEERS", {"Flower": fail, "hivemind": lambda *_: THEIRS})
    report = Report()
    compare.add(report, MINE, "124m")
    assert report.not_measured == [{"name": "vs. Flower", "reason": "pip failed: no such package"}]
    assert len(report.rows) == 2


def test_an_existing_environment_is_not_made_again(tmp_path):
    (tmp_path / "ready").write_text(repr((("nothing",),)))
    assert install(tmp_path, ("nothing",)) == tmp_path / "bin" / "python"


@pytest.mark.parametrize(
    ("said", "line"),
    [("ERROR: first\nERROR: no such\nnotice\n", "ERROR: no such"), ("a\nb\n", "b"), ("", "no output")],
)
def test_the_last_error_is_reported(said, line):
    assert last_error(said) == line
