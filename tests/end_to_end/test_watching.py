"""`atoll status --watch` in a terminal refreshes, survives a core's restart, and shows the age of its data."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.end_to_end.relay import relay
from tests.end_to_end.test_operators import atoll
from tests.end_to_end.world import Trainee, core, eventually

RETURN_S = 2.0  # limit on the time from a core's return until a watch shows it
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def shown(terminal: int, max_wait_s: float = 40.0) -> Iterator[str]:
    """Yields the screen whenever it changes."""
    deadline, text = time.monotonic() + max_wait_s, ""
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                more = os.read(terminal, 65536)
            except OSError:
                return  # the command has ended
            text = (text + more.decode(errors="replace"))[-200_000:]
            yield text


def seen(terminal: int, words: str) -> str:
    """Waits until the screen contains these words. Returns the screen."""
    for text in shown(terminal):
        if words in COLOUR.sub("", text):
            return text
    raise AssertionError(f'the screen did not show "{words}"')


@pytest.mark.ci
def test_the_watch_refreshes_and_shows_its_age_while_the_core_is_away(tmp_path):
    end: list[bool] = []
    with core(tmp_path) as running:
        trainee = Trainee(running.address, "eu-1", lambda _: bool(end), region="eu")
        trainee.start()
        terminal, theirs = pty.openpty()
        command = [sys.executable, "-m", "atoll.cli", "status", "--server", running.address, "--watch"]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "60"}
        watching = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        try:
            seen(terminal, "eu-1")
            seen(terminal, "goodput")
            running.kill()
            seen(terminal, "UTC: this status is 10 s old")  # gRPC alone would now wait for longer
            running.start()
            began = time.monotonic()
            seen(terminal, "epoch 2")
            assert time.monotonic() - began < RETURN_S
            watching.send_signal(signal.SIGINT)
            for _ in shown(terminal, 2.0):  # the remaining output must not block the command
                if watching.poll() is not None:
                    break
            assert watching.wait(20) == 0
        finally:
            if watching.poll() is None:
                watching.kill()
                watching.wait()
            os.close(terminal)
        end.append(True)
        trainee.done()


def test_the_watch_shows_the_core_two_seconds_after_a_silent_route_returns(tmp_path):
    with core(tmp_path) as running, relay(running.address) as route:
        command = [sys.executable, "-m", "atoll.cli", "status", "--server", route.address, "--watch", "-o", "jsonl"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            watching.stdout.readline()
            route.silence()
            for attempts in (1, 2):
                eventually(lambda attempts=attempts: route.silenced >= attempts)
            route.silence(silent=False)  # just after the start of an attempt, which fails
            began, at = time.monotonic(), time.time()
            while json.loads(watching.stdout.readline())["at"] < at:
                pass
            assert time.monotonic() - began < RETURN_S
            watching.send_signal(signal.SIGINT)
            assert watching.wait(20) == 0


def test_watch_and_json_cannot_be_combined():
    done = atoll("status", "--watch", "--json")
    said = "error: --watch and --json cannot be combined: give --output jsonl for one line per second\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_the_watch_prints_lines_of_json_for_programs(tmp_path):
    with core(tmp_path) as running:
        command = [sys.executable, "-m", "atoll.cli", "status", "--server", running.address, "--watch", "-o", "jsonl"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            first, second = (json.loads(watching.stdout.readline()) for _ in range(2))
            watching.send_signal(signal.SIGINT)
            assert watching.wait(20) == 0
    assert second["uptime_s"] > first["uptime_s"]
    assert first["run"] == second["run"]


@pytest.mark.parametrize("form", ["table", "wide"])
def test_the_watch_prints_one_table_after_another_without_a_terminal(tmp_path, form):
    with core(tmp_path) as running:
        command = [sys.executable, "-m", "atoll.cli", "status", "--server", running.address, "--watch", "-o", form]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            run, tables = running.status().run, 0
            while tables < 2:
                line = watching.stdout.readline()
                assert line, "the command ended"
                assert "\x1b" not in line
                tables += run in line
            running.kill()
            while "core unreachable since" not in line:
                line = watching.stdout.readline()
                assert line, "the command ended"
            watching.send_signal(signal.SIGINT)
            watching.stdout.read()
            assert watching.wait(20) == 0
