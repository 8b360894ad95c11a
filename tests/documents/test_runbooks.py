"""Every command of the runbooks is run or checked by a test, and can be copied where it is read."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.documents.fences import FENCE, ROOT, fences
from tests.documents.runbook_commands import ACTION, CHECKED, PAGE, RunbookCommand, commands
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


def test_commands_that_change_a_run_are_in_fences_where_they_are_run():
    """Only prose about options may name them."""
    prose = " ".join(FENCE.sub("", PAGE.read_text()).split())
    assert not ACTION.search(prose.replace("`atoll evict` and `atoll pause` need `--yes`", ""))
    assert {each.action for each in commands()} == {"", "evict", "pause", "resume", "checkpoint take"}


def test_actions_in_alerts_need_no_confirmation():
    """An operator pastes them after `kubectl exec`, where `atoll` has no terminal to ask on."""
    groups = yaml.safe_load((ROOT / "docker/prometheus/rules.yaml").read_text())["groups"]
    texts = [str(rule.get("annotations", "")) for group in groups for rule in group["rules"]]
    found = [words for text in texts for words in re.findall(r"`(atoll (?:evict|pause)\b[^`]*)`", text)]
    assert len(found) > 2
    assert not [words for words in found if not {"--yes", "--gone"} & set(words.split())]


@pytest.mark.parametrize("alert", ["AtollFrontDown", "AtollFrontWithoutCore"])
def test_a_fronts_runbook_tells_how_long_the_outage_may_last(alert: str):
    """The formula is also in docs/operate/monitoring.md, which the dashboard does not serve."""
    section = PAGE.read_text().split(f"## {alert}\n")[1].split("\n## ")[0]
    monitoring = (ROOT / "docs/operate/monitoring.md").read_text()
    (formula,) = re.findall(r"^\(`--max-staleness`.*outer step$", monitoring, re.MULTILINE)
    assert formula in section
    assert "```bash\natoll status\n" in section
    assert 'atoll_outage_budget_seconds{type="front"}' in section
