"""A short form of `make soak`: the product passes, and a learner that leaks a file per reconnect fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)


def soak(path: Path, *options: str) -> tuple[int, str, list[str]]:
    """Returns the exit status, the output, and the failures."""
    command = [sys.executable, "-m", "tests.soak.run", "--minutes", "1.2", "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout, json.loads(path.read_text())["wrong"]


@pytest.mark.ci
def test_nothing_grows_while_everything_is_cut_and_restarted(tmp_path):
    status, output, wrong = soak(tmp_path / "soak.json")
    assert (status, wrong) == (0, []), output


@pytest.mark.slow
def test_a_file_that_a_learner_leaks_at_each_reconnect_is_named(tmp_path):
    status, output, wrong = soak(tmp_path / "soak.json", "--leak", "b")
    assert status == 1
    assert any(each.startswith("learner b, start 1, chapter 2: other file descriptors grew") for each in wrong), output
    assert all(each.startswith("learner b, ") for each in wrong), output
