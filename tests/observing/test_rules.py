"""Prometheus rules: their series exist, each alert has a firing and a quiet case, and each has a runbook."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
import yaml

from tests.observing.exported import BY_PROMETHEUS, TARGET, Labels, exported
from tests.observing.promql import problems, promtool, series

pytestmark = [pytest.mark.observe, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent.parent
RULES, TESTS = ROOT / "docker/prometheus/rules.yaml", sorted((ROOT / "docker/prometheus/tests").glob("*.yaml"))
RUNBOOKS = ROOT / "docs/operate/runbooks.md"
RUNBOOK_URL = "http://localhost:7080/runbooks#"  # docker/compose.yaml's dashboard; tests/dashboard opens each section
ALWAYS = {"AtollWatchdog"}  # alerts that fire whenever Prometheus works
PARTS = ("meaning", "impact", "diagnosis", "mitigation")


def rules() -> list[dict]:
    """Returns all rules, in their order."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict]:
    """Returns the alerts by name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def known() -> dict[str, Labels]:
    """Returns the labels of exported and recorded series. A recorded series has those of its sources."""
    found = exported()
    for rule in rules():
        if "record" in rule:
            found[rule["record"]] = {
                label: values for name, _ in series(rule["expr"]) for label, values in found.get(name, {}).items()
            }
    return found


def cases() -> dict[str, list[dict]]:
    """Returns the expected alerts by the name of the case, from all files."""
    return {
        case["name"]: case["promql_expr_test"] for path in TESTS for case in yaml.safe_load(path.read_text())["tests"]
    }


def test_promtool_accepts_the_rules():
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(RULES))


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_rules_pass_their_cases(path):
    assert "SUCCESS" in promtool("test", "rules", str(path))


def test_each_alert_fires_in_one_case_and_stays_quiet_in_another():
    found, names = cases(), alerts()
    for name in names:
        firing = [found[case] for case in found if case.startswith(f"{name} fires")]
        quiet = [found[case] for case in found if case.startswith(f"{name} stays quiet")]
        assert firing, f"{name}: add a case in which the alert fires"
        assert quiet or name in ALWAYS, f"{name}: add a case in which the alert stays quiet"
        asked = f'ALERTS{{alertname="{name}", alertstate="firing"}}'
        for each in firing:
            assert any(asked in test["expr"] and test.get("exp_samples") for test in each), name
        for each in quiet:
            assert [test["expr"] for test in each] == [f"max_over_time({asked}[1d])"], name
            assert not any(test.get("exp_samples") for test in each), name
    tried = {case.split()[0] for case in found if case.startswith("Atoll")}
    assert tried == set(names)


def test_rules_use_existing_series():
    told = known()
    for rule in rules():
        assert not problems(rule["expr"], told), rule.get("alert") or rule["record"]


def test_a_core_needs_no_front_and_a_front_no_core():
    """Each component's rules record and use only its own series. Others may only suppress an alert (`unless`)."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        recorded = {rule["record"] for rule in group["rules"] if "record" in rule}
        for rule in group["rules"]:
            names = {name for name, _ in series(rule["expr"].partition(" unless on (run) core:")[0])}
            assert {name for name in names if ":" in name} <= recorded


def test_rules_of_one_run_do_not_depend_on_another_run():
    """`absent` has no labels, so it would be silent while any run has the series."""
    for rule in rules():
        assert "absent" not in rule["expr"]
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
            assert "run" in labels.split(", "), rule["expr"]


def test_each_alert_has_a_description_and_a_fix():
    labels = {label for of in exported().values() for label in of} | set(TARGET) | set(BY_PROMETHEUS["ALERTS"])
    for name, rule in alerts().items():
        said = rule["annotations"]
        assert set(said) == {"summary", "description", "runbook_url"}, name
        assert rule["labels"]["severity"] in {"critical", "warning", "info", "none"}
        assert len(re.sub("{{.*?}}", "", said["summary"])) < 100
        assert len(said["description"]) > 50
        assert said["runbook_url"] == f"{RUNBOOK_URL}{name.lower()}"
        assert set(re.findall(r"\$labels\.(\w+)", str(said))) <= labels, name


def sections() -> dict[str, str]:
    """Returns the text of the runbooks by heading."""
    parts = re.split(r"^## (.*)$", RUNBOOKS.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_alerts_and_sections_of_the_runbooks_match():
    assert list(sections()) == list(alerts()), "sections must be in the rules' order"
    for name, text in sections().items():
        for part in PARTS:
            assert re.search(rf"^(\*\*|### ){part}\b", text, re.MULTILINE | re.IGNORECASE), f"{name}: no {part!r}"


def test_runbooks_use_existing_series():
    told = known()
    for name, text in sections().items():
        for expr in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
            for line in expr.strip().splitlines():
                assert not problems(line, told), name


def test_runbooks_and_alerts_name_existing_commands():
    app = typer.Typer()
    for entry in entry_points(group="atoll.commands"):
        entry.load()(app)
    root = typer.main.get_command(app)
    texts = [RUNBOOKS.read_text(), *(str(rule.get("annotations", "")) for rule in rules())]
    found = [
        line for text in texts for line in re.findall(r"(?<![\w/.-])atoll ((?:[a-z]+)(?: [^`\n#]*)?)(?=[`\n#])", text)
    ]
    assert len(found) > 30
    for line in found:
        command, words = root, line.split()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not hasattr(command, "commands"), f"atoll {line}: unknown command"
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, f"atoll {line}: unknown option"
