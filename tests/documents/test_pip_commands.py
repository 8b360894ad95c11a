"""Every `pip install` command of README.md, the documentation and the examples resolves in an empty environment."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.documents.fences import ROOT
from tests.documents.pip_commands import pip_commands
from tests.documents.test_pages import copied

COMMANDS = pip_commands()
CONSTRAINED = {"-c", "--constraint"}


def newest(words: list[str]) -> tuple[str, ...]:
    """Returns a command without its constraints, so that pip takes the newest versions."""
    return tuple(words[2:] if words[0] in CONSTRAINED else words)


DISTINCT = sorted({tuple(words) for words in COMMANDS.values()} | {newest(words) for words in COMMANDS.values()})


def test_the_commands_are_found_and_name_extras_that_exist():
    assert {place.partition(":")[0] for place in COMMANDS} >= {"README.md", "docs/start.md", "examples/hf_trainer.py"}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for place, words in COMMANDS.items():
        extras = [each for word in words for each in re.findall(r"^\.\[(.*)\]$", word)]
        assert all(set(each.split(",")) <= known.keys() for each in extras), place


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the Python of a new virtual environment, and a checkout."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    return folder / "venv/bin/python", copied(folder / "atoll")


@pytest.mark.slow  # needs the network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", DISTINCT, ids=shlex.join)
def test_a_command_resolves_in_an_empty_environment(empty, words):
    python, checkout = empty
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run"]
    done = subprocess.run([*pip, *words], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Would install" in done.stdout, done.stdout[-3000:]
    print(done.stdout.splitlines()[-1])
