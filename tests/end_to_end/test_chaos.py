"""`atoll chaos`: killed processes come back, and the summary states the cost."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.slow
ATOLL = [sys.executable, "-m", "atoll.cli"]


def test_killed_processes_come_back_with_their_recovery_phases(tmp_path):
    out = tmp_path / "out.json"
    done = subprocess.run(
        [*ATOLL, "chaos", "--learners", "2", "--seconds", "25", "--json", str(out),
         "--schedule", "2:kill:us-east,6:kill:core,9:pause:eu-west:1.5"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["kills"] == {"learner": 1, "core": 1, "paused": 1}
    learner, core = found["hits"]
    assert (learner["target"], core["target"]) == ("us-east", "core")
    assert all(learner[part] > 0 for part in ("prepared_s", "joining_s", "first_step_s"))
    assert core["serving_s"] > 0
    assert 0.3 < found["goodput"] < 1.0
    # On a slow machine, the learner comes back while the core is dead.
    down_s = sum(learner[part] for part in ("prepared_s", "joining_s", "first_step_s")) + core["serving_s"]
    assert learner["prepared_s"] - 1.0 <= found["goodput_lost_s"]["restarting"] <= down_s + 1.0
    counts = found["contributions"]
    assert counts["pending"] == 0
    assert counts["accepted"] == counts["merged"] + counts["refused"]
    assert "atoll chaos" in done.stdout


def test_a_process_that_ends_by_itself_ends_chaos_with_one_line(tmp_path):
    started, file = tmp_path / "pid", tmp_path / "Procfile"
    core, bad = tmp_path / "core.py", tmp_path / "bad.py"
    # The core lives until chaos ends it, or until an alarm if chaos does not.
    core.write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path('{started}.part').write_text(str(os.getpid()))\n"
        f"os.rename('{started}.part', '{started}')\n"
        "signal.alarm(120)\n"
        "signal.pause()\n"
    )
    bad.write_text(f"import os\nwhile not os.path.exists('{started}'):\n    pass\nraise SystemExit(3)\n")
    file.write_text(f"core: {sys.executable} {core}\nbad: {sys.executable} {bad}\n")
    command = [*ATOLL, "chaos", "--procfile", str(file), "--server", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: bad exited with status 3: its log is empty\n"
    assert not psutil.pid_exists(int(started.read_text())), "chaos must end the other processes"
