"""The `atoll` command: what it lists, what it loads, and that every option is an environment variable too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ATOLL = [sys.executable, "-m", "atoll.command"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, COLUMNS="200", NO_COLOR="1", TERM="dumb") | environment
    return subprocess.run([*ATOLL, *arguments], capture_output=True, text=True, timeout=60, env=env)


def test_help_lists_what_is_installed():
    shown = run("--help").stdout
    for command in ("core", "learner", "status", "checkpoint", "demo"):
        assert f" {command} " in shown


@pytest.mark.parametrize("command", ["core", "learner", "demo", "status"])
def test_every_option_says_what_it_is_and_which_variable_sets_it(command):
    shown = run(command, "--help").stdout
    for line in shown.splitlines():
        if "--" in line and "--help" not in line:
            assert "[env var: ATOLL_" in shown[shown.index(line) :][:1200], line


def test_an_environment_variable_stands_for_its_option(tmp_path):
    done = run("core", ATOLL_CORE_DIR=str(tmp_path / "run"), ATOLL_CORE_LISTEN="0.0.0.0:0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 0.0.0.0:0 is not loopback")


def test_the_version_is_the_packages():
    assert run("--version").stdout.startswith("atoll 0.")


def test_nothing_heavy_is_loaded_to_show_help_or_to_import_the_package():
    imports = "import sys, atoll, atoll.command, atoll.commands, atoll_server.commands"
    code = f"{imports}; print({{'torch', 'numba'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
