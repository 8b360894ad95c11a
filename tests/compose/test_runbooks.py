"""Each command of the runbooks runs in the demo: those for Compose as written, the others in the right container."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.compose.stack import LEARNERS, Stack, until
from tests.documents.runbook_commands import ATOLL, COMPOSE, RunbookCommand, commands

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

STOPPED = "checkpoint verify"  # for a directory that no core uses
HERE = {  # what the runbooks name -> the same in the demo
    "front.eu.example.com:7071": "front-eu:7071",
    "core.example.com:7070": "relay-eu:7070",
    "localhost:7070": "core:7070",
    "certs/learner-eu-west": "/etc/atoll/tls/learner",
    "certs/front-eu": "/etc/atoll/tls/front",
    "certs/core-home": "/etc/atoll/tls",
    "certs/operator-alice": "/etc/atoll/viewer",
    "--name eu-west": "--name eu.west",
    "--dir run": "--dir /var/lib/atoll/run",
    "verify run": "verify /var/lib/atoll/run",
}
PLACES = {"tls/learner": "learner-eu", "tls/front": "front-eu"}  # a part of a command -> its service, if not core


@pytest.fixture(scope="module")
def training(stack: Stack, up):
    """Waits until each learner's work was merged and a snapshot taken. Returns a learner's name."""
    stack.operator("checkpoint", "take")
    until(lambda: int(stack.status()["contributions"]["merged"]) > 4)
    return next(each["learner"] for each in stack.status()["learners"] if each["region"] == "eu")


@pytest.mark.parametrize("command", commands(COMPOSE), ids=str)
def test_a_compose_command_runs_as_written(command: RunbookCommand, stack: Stack, training):
    words = shlex.split(command.text)[2:]
    printed = _run(stack, words, stopped=STOPPED in command.text)
    if "logs" in words:
        assert words[-1] in printed, "each line begins with the container's name"
    kept = command.filtered(printed)
    if command.filter == "snapshot":
        assert "snapshot taken" in kept
    if "doctor" in words:
        assert "BAD" not in printed
        assert "ok " in printed
    if "SIGUSR1" in words:
        until(lambda: "Current thread" in stack.compose("logs", "--tail", "300", "learner-eu"))
        assert all(each["RestartCount"] == 0 for each in stack.containers("learner-eu"))


@pytest.mark.parametrize("command", commands(ATOLL), ids=str)
def test_an_atoll_command_runs_in_its_container(command: RunbookCommand, stack: Stack, training):
    gone = next(each["learner"] for each in stack.status()["learners"] if each["region"] == "ap")
    text = re.sub(r"--learner \S+", f"--learner {training}", command.text)
    text = re.sub(r"\bevict \S+", f"evict {gone}", text)
    for named, here in HERE.items():
        text = text.replace(named, here)
    assert not re.search(r"example|certs/|[A-Z]{4}", text), f"name what {text} means in the demo: add it to HERE"
    service = next((name for part, name in PLACES.items() if part in text), "core")
    words = shlex.split(text)
    if STOPPED in text:
        _run(stack, ["run", "--rm", "--no-deps", service, *words[1:]], stopped=True)
        return
    if "--gone" in words:
        _written_off(stack, words, gone)
        return
    # In the other containers, commands cannot change the run.
    printed = stack.operator(*words[1:]) if command.action else _run(stack, ["exec", service, *words])
    assert printed.strip()
    assert "BAD" not in printed
    if command.action in {"pause", "resume"}:
        assert bool(stack.status()["paused"]) == (command.action == "pause")


def _written_off(stack: Stack, words: list[str], learner: str) -> None:
    """Kills a learner, runs the command that writes it off, and starts it again."""
    stack.compose("kill", "learner-ap")
    until(lambda: _accepted(stack, words))
    assert _states(stack)[learner] == "left"
    stack.compose("start", "learner-ap", timeout=200)
    until(lambda: _states(stack)[learner] == "live")


def _accepted(stack: Stack, words: list[str]) -> bool:
    """Runs a command, which the core refuses while the learner still reports."""
    try:
        return "has left" in stack.operator(*words[1:])
    except AssertionError as error:
        if "stop its process first" not in str(error):
            raise
        return False


def _states(stack: Stack) -> dict[str, str]:
    return {each["learner"]: each["state"] for each in stack.status()["learners"]}


def test_a_viewer_in_the_core_container_sees_all_learners(stack: Stack, training):
    learners = json.loads(_run(stack, ["exec", "core", "atoll", "status", "--json"]))["learners"]
    assert {each["region"] for each in learners} == {name.removeprefix("learner-") for name in LEARNERS}


def _run(stack: Stack, words: list[str], *, stopped: bool = False) -> str:
    """Runs a command of Compose, if `stopped` while the core is stopped. Returns the output."""
    if not stopped:
        return stack.compose(*words)
    stack.compose("stop", "core", "backup", timeout=150)
    try:
        return stack.compose(*words)
    finally:
        stack.compose("up", "--detach", "--no-build", "--pull", "never", "--wait", "core", "backup", timeout=200)
