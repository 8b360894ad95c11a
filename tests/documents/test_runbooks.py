"""Every command of the runbooks is run or checked by a test."""

from __future__ import annotations

import re

import pytest

from tests.documents.fences import fences
from tests.documents.runbook_commands import CHECKED, PAGE, RunbookCommand, commands
from tests.documents.test_messages import code_texts


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_command_is_of_a_kind_that_a_test_covers(command: RunbookCommand):
    assert command.kind, f"begin the command with one of {CHECKED}, or test it elsewhere"
    assert not re.search(r"[|;&<>$`]", command.text), "the tests run single commands, without a shell"
    assert command.filter in code_texts(), "no log line of Atoll has this text"


def test_all_kinds_occur_and_all_commands_are_in_bash_fences():
    assert {each.kind for each in commands()} == set(CHECKED)
    assert len(commands()) > 40
    assert {fence.language for fence in fences(PAGE)} == {"bash", "promql"}
