"""The runbooks' commands that change a run, and the filters of logs, work with a real core, without a terminal."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from atoll_wire.contract import LearnerState

from tests.documents.runbook_commands import ATOLL, RunbookCommand, commands
from tests.end_to_end.test_refusals import Hand, _junk, request
from tests.end_to_end.world import Core, Trainee, core, eventually, train

WRITE_OFFS = [each for each in commands(ATOLL) if each.text.endswith("--gone")]
ACTIONS = [each for each in commands(ATOLL) if each.action and each not in WRITE_OFFS]
FILTERS = {each.filter: each for each in commands() if each.filter}
NAME = "eu-west"  # the learner in the runbooks


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Core]:
    with core(tmp_path_factory.mktemp("core")) as it:
        train(it.address, "us-east", steps=40)
        yield it


def atoll(running: Core, text: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as `kubectl exec` does: without a terminal, with the core's address in the environment."""
    words = [sys.executable, "-m", "atoll.cli", *shlex.split(text)[1:]]
    environment = os.environ | {"ATOLL_SERVER": running.address}
    return subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


def done(running: Core, action: str) -> bool:
    """Returns whether an action has had its effect."""
    status = running.status()
    match action:
        case "pause":
            return bool(status.paused)
        case "resume":
            return not status.paused
    return "snapshot taken" in running.log()


def test_actions_work_in_the_runbooks_order(running: Core):
    stop: list[bool] = []
    trainee = Trainee(running.address, NAME, lambda _: bool(stop))
    trainee.start()
    try:
        eventually(lambda: len(trainee.losses) > 20)
        for each in ACTIONS:
            assert each.action in {"resume", "checkpoint take"} or not done(running, each.action)
            ran = atoll(running, each.text)
            assert ran.returncode == 0, f"{each}: {ran.stderr}"
            assert done(running, each.action), each
    finally:
        stop.append(True)
        trainee.join(60)
    assert trainee.error is None


def test_a_learner_whose_process_has_ended_is_written_off(running: Core):
    (each,) = WRITE_OFFS
    name = shlex.split(each.text)[2]
    with running.outer() as stub:
        stub.Join(request(name), timeout=60)
    eventually(lambda: atoll(running, each.text).returncode == 0, 60.0)
    assert {each.learner: each.state for each in running.status().learners}[name] == LearnerState.LEFT


@pytest.mark.parametrize("command", [each for each in ACTIONS if each.action == "pause"], ids=str)
def test_without_yes_an_action_is_refused_where_there_is_no_terminal(command: RunbookCommand, running: Core):
    ran = atoll(running, command.text.replace(" --yes", ""))
    assert ran.returncode == 2
    assert "add --yes" in ran.stderr


def test_each_filter_finds_its_lines_in_a_cores_log(running: Core):
    with running.outer() as stub, pytest.raises(grpc.RpcError):
        Hand(stub).push(_junk)
    assert atoll(running, "atoll checkpoint take").returncode == 0
    assert set(FILTERS) == {"turned away", "snapshot"}
    for pattern, command in FILTERS.items():
        eventually(lambda pattern=pattern: pattern in running.log())
        kept = command.filtered(running.log()).splitlines()
        assert 0 < len(kept) < len(running.log().splitlines())
        assert all(pattern in line for line in kept)
