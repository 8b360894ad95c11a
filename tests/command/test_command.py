"""The `atoll` command: its subcommands, the modules that it loads, and an environment variable for each option."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

ATOLL = [sys.executable, "-m", "atoll.cli"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, COLUMNS="200", NO_COLOR="1", TERM="dumb") | environment
    return subprocess.run([*ATOLL, *arguments], capture_output=True, text=True, timeout=60, env=env)


def test_help_lists_the_installed_subcommands():
    shown = run("--help").stdout
    for command in ("core", "learner", "status", "receipts", "evict", "checkpoint", "demo", "chaos"):
        assert f" {command} " in shown


@pytest.mark.parametrize("command", ["core", "learner", "demo", "chaos", "status", "receipts", "evict"])
def test_every_option_has_a_help_text_and_a_variable(command):
    shown = run(command, "--help").stdout
    for line in shown.splitlines():
        if re.match(r"│ [* ]*--", line) and "--help" not in line:
            assert "[env var: ATOLL_" in shown[shown.index(line) :][:1200], line


def test_an_environment_variable_sets_its_option(tmp_path):
    done = run("core", ATOLL_CORE_DIR=str(tmp_path / "run"), ATOLL_CORE_LISTEN="0.0.0.0:0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 0.0.0.0:0 is not loopback")


def test_the_version_is_the_packages():
    assert run("--version").stdout.startswith("atoll 0.")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--nothing"], 2, "No such option: --nothing"),
        (["--threads", "-1"], 2, "error: --threads -1: input should be greater than or equal to 0"),
        (["--seed", "-1"], 2, "error: --seed -1: input should be greater than or equal to 0"),
        (["--max-steps", "0"], 2, "error: --max-steps 0: input should be greater than or equal to 1"),
        (["--slow-down", "inf"], 2, "error: --slow-down inf: input should be a finite number"),
        (["--connect-timeout-s", "inf"], 2, "error: --connect-timeout-s inf: input should be a finite number"),
        (["--metrics-listen", "0.0.0.0:0"], 1, "--metrics-plaintext"),
        (["--data", "/nothing"], 1, "error: --data /nothing does not exist: give a text file or a folder"),
        (["--device", "nonsense"], 1, "error: --device nonsense cannot be used"),
    ],
)
def test_a_learner_that_cannot_start_gives_the_reason_in_one_line(arguments, status, said):
    done = run("learner", "--name", "a", "--server", "127.0.0.1:1", *arguments)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("number", "elsewhere"),
    [
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.ci),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.ci),
    ],
)
def test_a_learner_that_waits_for_its_core_ends_when_it_is_asked_to(number, elsewhere):
    command = [*ATOLL, "learner", "--name", "a", "--server", "127.0.0.1:1", "--connect-timeout-s", "100"]
    learner = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - a script's jobs ignore it
    )  # fmt: skip
    try:
        assert learner.stdout is not None
        while "waiting for the core" not in learner.stdout.readline():
            assert learner.poll() is None
        # The kernel may deliver a signal to another thread. The training thread then keeps sleeping.
        threads = [thread.id for thread in psutil.Process(learner.pid).threads()]
        os.kill(max(threads) if elsewhere else learner.pid, number)
        said, _ = learner.communicate(timeout=15)
        assert learner.returncode not in {0, None}
        assert "Traceback" not in said
    finally:
        learner.kill()
        learner.wait()


def test_help_and_the_package_load_no_heavy_modules():
    imports = "import sys, atoll, atoll.cli, atoll.commands, atoll_server.cli.commands"
    code = f"{imports}; print({{'torch', 'numba'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
