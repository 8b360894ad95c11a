"""Every `pip install` command of README.md, the documentation and the examples works in an empty environment."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents.fences import ROOT
from tests.documents.pip_commands import pip_commands
from tests.documents.test_pages import copied

COMMANDS = pip_commands()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {  # extra ("" for none), or package that Atoll does not need itself -> what it is for
    "": ["atoll_server.front.server"],
    "server": ["atoll_server.service.server"],
    "learner": ["atoll.learner", "atoll.follower.follower", "atoll.data"],
    "dashboard": ["atoll_dashboard.web.server"],
    "plots": ["atoll_forecast.paper.plots"],
    "accelerate": ["atoll.integrations.accelerate"],
    "lightning": ["atoll.integrations.lightning"],
    "transformers": ["atoll.integrations.transformers"],
    "datasets": ["datasets"],
    "peft": ["peft"],
}


def newest(words: list[str]) -> tuple[str, ...]:
    """Returns a command without its constraints, so that pip takes the newest versions."""
    return tuple(words[2:] if words[0] == "--constraint" else words)


def wanted(words: tuple[str, ...]) -> list[str]:
    """Returns the extras and packages that a command installs."""
    found = []
    for word in words:
        atoll = re.fullmatch(r"\.(?:\[(.*)\])?", word)
        if atoll:
            found += (atoll[1] or "").split(",")
        elif word in MODULES:
            found.append(word)
    return found


WRITTEN = {place: ["--constraint" if word == "-c" else word for word in words] for place, words in COMMANDS.items()}
DISTINCT = sorted({tuple(words) for words in WRITTEN.values()} | {newest(words) for words in WRITTEN.values()})


def test_the_commands_are_found_and_name_extras_that_exist():
    assert {place.partition(":")[0] for place in COMMANDS} >= {"README.md", "docs/start.md", "examples/hf_trainer.py"}
    for place, words in COMMANDS.items():
        extras = [each for word in words for each in re.findall(r"^\.\[(.*)\]$", word)]
        assert all(set(each.split(",")) <= PROJECT["optional-dependencies"].keys() for each in extras), place
        assert wanted(tuple(words)), place


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("checkout") / "atoll")


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """Yields the `bin` folder of a new virtual environment, which is deleted after the test."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    yield tmp_path / "venv/bin"
    shutil.rmtree(tmp_path / "venv")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a user's shell. torch has the tested version: pip may get another only as a large CUDA build.

    pip does not compile the modules, which would take longer than the installation.
    """
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (tmp_path / "torch.txt").write_text(torch[0] + "\n")
    mine = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return mine | {"PIP_CONSTRAINT": str(tmp_path / "torch.txt"), "PIP_NO_COMPILE": "1"}


def checked(command: list[str | Path], where: Path, environment: dict[str, str]) -> str:
    """Returns the output of a command that must succeed."""
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow  # installs from the network: up to half an hour in all
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("words", DISTINCT, ids=shlex.join)
def test_a_command_installs_what_its_reader_needs(empty, environment, checkout, tmp_path, words):
    began = time.monotonic()
    checked([empty / "pip", "install", *words], checkout, environment)
    seconds = time.monotonic() - began
    for module in (module for each in wanted(words) for module in MODULES[each]):
        checked([empty / "python", "-c", f"import {module}"], tmp_path, environment)
    if any(word.startswith(".") for word in words):
        assert "Usage: atoll" in checked([empty / "atoll", "--help"], tmp_path, environment)
    for page in (place.partition(":")[0] for place, mine in WRITTEN.items() if tuple(mine) == words):
        if page.startswith("examples/") and page.endswith(".py"):
            checked([empty / "python", page, "--help"], checkout, environment)  # after all imports
    print(f"\n| `pip install {shlex.join(words)}` | {seconds:.0f} s | {versions(empty, environment, tmp_path)} |")


def versions(empty: Path, environment: dict[str, str], where: Path) -> str:
    """Returns the versions of the installed packages that pyproject.toml or a command names."""
    lines = [*PROJECT["dependencies"], *(each for lines in PROJECT["optional-dependencies"].values() for each in lines)]
    direct = {re.match(r"[\w-]+", line)[0] for line in lines} | MODULES.keys() - {"atoll"}
    found = json.loads(checked([empty / "pip", "list", "--format", "json"], where, environment))
    return ", ".join(f"{each['name']} {each['version']}" for each in found if each["name"] in direct - {"atoll"})
