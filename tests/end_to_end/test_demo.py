"""A short `atoll demo`: both kills, every figure, and no remaining child process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from atoll.demo.kills import KILL_AT, Kills, victims
from atoll.demo.settings import DemoSettings

from tests.end_to_end.world import eventually

DEMO = [sys.executable, "-m", "atoll.cli", "demo"]
FIELDS = {
    "learners", "parameters", "merges", "tokens_trained", "tokens_merged", "validation_loss", "goodput",
    "goodput_lost_s", "learner_blocked_fraction", "wire_bits_per_parameter", "wire_bytes", "whole_bytes", "kills",
    "contributions", "seconds",
}  # fmt: skip
OF_SHARDS = ["the front", "learner us-east", "shard 2", "the registrar, which has shard 0,"]


@pytest.mark.ci
@pytest.mark.timeout(240)
def test_a_short_demo_survives_both_kills_and_states_their_cost(tmp_path):
    arguments = ["--steps", "300", "--json", str(tmp_path / "out.json"), "--keep", str(tmp_path / "kept")]
    done = subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed learner us-east with SIGKILL" in done.stdout
    assert "killed the core with SIGKILL" in done.stdout
    summary = json.loads((tmp_path / "out.json").read_text())
    assert set(summary) == FIELDS
    assert summary["kills"] == {"learner": 1, "core": 1}
    assert summary["learners"] == 3
    assert summary["parameters"] == 1_049_984
    assert summary["validation_loss"]["last"] < 0.6 * summary["validation_loss"]["first"]
    counts = summary["contributions"]
    assert counts["accepted"] == counts["merged"] + counts["refused"]
    assert counts["pending"] == 0
    assert summary["tokens_trained"] >= 300 * 8 * 128
    assert 0.8 < summary["tokens_merged"] / summary["tokens_trained"] <= 1.0
    assert 0 < summary["learner_blocked_fraction"] < 0.05
    for direction in ("up", "down"):
        assert 2.5 < summary["wire_bits_per_parameter"][direction] < 3.6
        assert summary["wire_bytes"][direction] > 0
    assert 0.3 < summary["goodput"] <= 1.0  # such a short run consists mostly of starts
    again = subprocess.run([*DEMO[:-1], "replay", str(tmp_path / "kept" / "run")], capture_output=True, text=True)
    assert "the same, byte for byte" in again.stdout, again.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_demo_over_shards_survives_the_kill_of_a_shard_the_registrar_a_learner_and_the_front(tmp_path):
    arguments = ["--shards", "3", "--steps", "300", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in OF_SHARDS:
        assert f"killed {what} with SIGKILL" in done.stdout
    summary = json.loads((tmp_path / "out.json").read_text())
    assert set(summary) == FIELDS, "the same as without shards"
    assert summary["kills"] == {"learner": 1, "front": 1, "shard": 1, "registrar": 1, "core": 2}
    assert summary["validation_loss"]["last"] < 0.6 * summary["validation_loss"]["first"]
    counts = summary["contributions"]
    assert counts["accepted"] == counts["merged"] + counts["refused"]
    assert counts["pending"] == 0
    assert 0.8 < summary["tokens_merged"] / summary["tokens_trained"] <= 1.0
    assert 0.3 < summary["goodput"] <= 1.0  # such a short run consists mostly of starts


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({}, ["learner", "core"]),
        ({"regions": 2}, ["front", "learner", "link", "core"]),
        ({"shards": 3}, ["front", "learner", "shard", "registrar"]),
    ],
)
def test_each_demo_kills_only_processes_that_it_has(options, planned):
    found = [victim.value for victim in victims(DemoSettings(**options))]
    assert found == planned
    assert sorted(KILL_AT.values()) == list(KILL_AT.values()), "`look` takes the first due victim"


@pytest.mark.parametrize(
    ("shards", "names", "killed"),
    [
        (1, ["learner", "core"], ["learner us-east", "the core"]),
        (3, ["learner", "core", "front", "shard", "registrar"], OF_SHARDS),
    ],
)
def test_kills_are_counted_by_names_that_tell_shards_registrar_and_front(shards, names, killed):
    notes, restarted = list[str](), list[object]()
    every = SimpleNamespace(
        note=notes.append, start=lambda *_: every, restart=lambda *number: restarted.append(number or "front"),
        kill=lambda: None, name="us-east", command=[],
    )  # fmt: skip
    kills = Kills(DemoSettings(shards=shards), every, every, every, every, every, [every, every, every])
    assert list(kills.counts()) == names
    for _ in names:
        kills.look(1.0)
    assert [note.partition(" with SIGKILL")[0] for note in notes] == [f"killed {each}" for each in killed]
    assert kills.counts() == dict.fromkeys(names, 1) | ({"core": 2} if shards > 1 else {})
    assert restarted == (["front", (2,), (0,)] if shards > 1 else [(0,)]), "shards are numbered from 0"


def test_regions_and_shards_cannot_be_combined(tmp_path):
    done = subprocess.run([*DEMO, "--regions", "2", "--shards", "2"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --regions and --shards cannot be combined")
    assert done.stderr.endswith("give only one of them\n")


EARLY = """
import os, pathlib, signal, subprocess, sys
from atoll.demo import processes
started = []
class Interrupted(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        started.append(self)
        os.kill(os.getpid(), signal.SIGINT)
subprocess.Popen = Interrupted
try:
    with processes.children(pathlib.Path(sys.argv[1])) as group:
        group.start("child", ["sleep", "60"])
except KeyboardInterrupt:
    print("ended" if started[0].poll() is not None else started[0].kill())
"""


def test_ctrl_c_ends_a_child_that_is_being_started(tmp_path):
    done = subprocess.run([sys.executable, "-c", EARLY, str(tmp_path)], capture_output=True, text=True, timeout=50)
    assert done.stdout == "ended\n", done.stderr


TWICE = """
import os, pathlib, signal, sys
from atoll.demo import processes
started = []
class Interrupted(processes.Child):
    __slots__ = ()
    def kill(self):
        os.kill(os.getpid(), signal.SIGTERM)
        super().kill()
processes.Child = Interrupted
try:
    with processes.children(pathlib.Path(sys.argv[1])) as group:
        started += [group.start(name, ["sleep", "60"]) for name in ("one", "two")]
        os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    print(*(each.process.poll() if each.process.poll() is not None else each.process.kill() for each in started))
"""


def test_a_second_signal_does_not_keep_children_alive(tmp_path):
    done = subprocess.run([sys.executable, "-c", TWICE, str(tmp_path)], capture_output=True, text=True, timeout=50)
    assert done.stdout == "-9 -9\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_every_child(number):
    """SIGINT is ignored at the start, as in a shell script's background processes."""
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "demo", *DEMO, "--no-kills"]
    unbuffered = dict(os.environ, PYTHONUNBUFFERED="1")
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=unbuffered)
    children: list[psutil.Process] = []
    try:
        assert demo.stdout is not None
        while "starting 3 learners" not in demo.stdout.readline():
            assert demo.poll() is None
        eventually(lambda: len(psutil.Process(demo.pid).children()) == 5)  # a core, three learners, a dashboard
        children = psutil.Process(demo.pid).children()
        demo.send_signal(number)
        assert demo.wait(30) != 0
        _, alive = psutil.wait_procs(children, timeout=5)  # a killed process disappears a moment later
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    finally:
        if demo.poll() is None:
            children = children or psutil.Process(demo.pid).children(recursive=True)
        demo.kill()
        demo.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        demo.stdout.close()
