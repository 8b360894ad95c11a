"""The shipped configuration of Alertmanager: routes, and a real Alertmanager that mutes what follows from a fault."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from atoll.demo.processes import DemoError, children, free_port

from tests.end_to_end.world import eventually
from tests.observing.test_rules import alerts

pytestmark = [pytest.mark.observe, pytest.mark.timeout(120)]
ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "docker/alertmanager/alertmanager.yaml"
CASES = ROOT / "docker/prometheus/tests/scenes.yaml"
LABEL = re.compile(r'(\w+)="([^"]*)"')
CORE = {"alertname": "AtollCoreDown", "run": "a", "severity": "critical"}
CUT = {"alertname": "AtollFrontWithoutCore", "run": "a", "region": "ap", "severity": "critical"}
DEAD = CUT | {"alertname": "AtollFrontDown"}
SEEN = CUT | {"alertname": "AtollFrontCutOff", "link": "ap"}
SILENT = {"alertname": "AtollLearnerSilent", "run": "a", "region": "ap", "learner": "p", "severity": "warning"}
LOST = SILENT | {"alertname": "AtollLearnerWithoutCore"}

# Scene -> the alerts that Prometheus fires, and those of them that notify.
SCENES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "a dead core, with fronts that another Prometheus watches": (
        [CORE, *(CUT | {"region": region} for region in ("eu", "us", "ap"))], [CORE]),
    "a dead core of another run": ([CORE | {"run": "b"}, CUT], [CORE | {"run": "b"}, CUT]),
    "a cut link": ([CUT, LOST], [CUT]),
    "a cut link, with a front that another Prometheus watches": ([CUT, SEEN, LOST], [CUT]),
    "a cut link, with a front that no Prometheus watches": ([SEEN, LOST], [SEEN]),
    "one of two fronts of a region, and a learner that died": ([DEAD, SILENT, LOST], [DEAD, SILENT]),
    "no learner trains": (
        [{"alertname": "AtollNoLearnerLive", "run": "a", "severity": "critical"}, SILENT],
        [{"alertname": "AtollNoLearnerLive", "run": "a", "severity": "critical"}]),
}  # fmt: skip
BUDGET = "AtollOutageBudgetLow"

# Case of scenes.yaml -> the names of the alerts that notify.
NOTIFY = {
    "a cut link is one page, for the region's front, and warnings that are muted": [BUDGET],
    "a lost region is one page, for its front, and a warning that is muted": [BUDGET],
    "a cut link to a front in another cloud, whose Prometheus is another, is one page": [BUDGET],
    "the death of a run's only front is one page, for this front": ["AtollFrontDown"],
    "a learner that dies while one of its region's two fronts is down has its own alert": [
        "AtollFrontDown", "AtollLearnerSilent"],
    "a dead core behind three fronts is one alert, and warnings that are muted": ["AtollCoreDown"],
}  # fmt: skip


def fired(case: str) -> list[dict[str, str]]:
    """Returns the labels of all alerts that a case of scenes.yaml expects by its end."""
    found = {each["name"]: each["promql_expr_test"][-1] for each in yaml.safe_load(CASES.read_text())["tests"]}
    return [dict(LABEL.findall(sample["labels"])) for sample in found[case]["exp_samples"]]


@pytest.fixture
def url(tmp_path) -> Iterator[str]:
    """Starts Debian's Alertmanager with the shipped configuration. Returns the address of its API."""
    port = free_port()
    words = [f"--config.file={CONFIG}", f"--storage.path={tmp_path}/silences", "--cluster.listen-address="]
    with children(tmp_path) as group:
        try:
            group.start("alertmanager", ["prometheus-alertmanager", *words, f"--web.listen-address=127.0.0.1:{port}"])
        except DemoError as error:
            pytest.fail(f"{error}: install Alertmanager (apt-get install prometheus-alertmanager)", pytrace=False)
        address = f"http://127.0.0.1:{port}/api/v2/alerts"
        eventually(lambda: _answers(address))
        yield address


def _answers(url: str) -> bool:
    try:
        return _get(url) == []
    except OSError:
        return False


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("scene", SCENES)
def test_only_the_cause_notifies(url, scene):
    firing, notifying = SCENES[scene]
    assert _notified(url, firing, len(notifying)) == sorted(notifying, key=sorted_items)


@pytest.mark.parametrize("case", NOTIFY)
def test_only_the_cause_of_a_tested_scene_notifies(url, case):
    """The alerts are those that Prometheus fires in docker/prometheus/tests/scenes.yaml."""
    firing = fired(case)
    assert len(firing) > 1
    assert sorted(each["alertname"] for each in _notified(url, firing, len(NOTIFY[case]))) == sorted(NOTIFY[case])


@pytest.mark.parametrize("alert", [BUDGET, "AtollFrontDown", "AtollFrontWithoutCore", "AtollFrontCutOff"])
def test_before_and_after_the_budget_runs_low_one_alert_notifies(url, alert):
    """AtollOutageBudgetLow fires first if the budget is short, and last if it is long."""
    firing = [CUT | {"alertname": alert}, {"alertname": "AtollGoodputLow", "run": "a", "severity": "warning"}, LOST]
    assert [each["alertname"] for each in _notified(url, firing, 1)] == [alert]


def _notified(url: str, firing: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """Sends alerts to Alertmanager. Waits until `count` of them are not muted, and returns these, sorted."""
    body = json.dumps([{"labels": labels} for labels in firing]).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=20).close()

    def active() -> list[dict[str, str]]:
        return [each["labels"] for each in _get(f"{url}?inhibited=false")]

    eventually(lambda: len(_get(url)) == len(firing) and len(active()) == count)
    return sorted(active(), key=sorted_items)


def sorted_items(labels: dict[str, str]) -> list[tuple[str, str]]:
    """Returns labels in an order that can be compared."""
    return sorted(labels.items())


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (["alertname=AtollCoreDown", "severity=critical"], "pages"),
        (["alertname=AtollLearnerSilent", "severity=warning"], "tickets"),
        (["alertname=AtollRunPaused", "severity=info"], "tickets"),
        (["alertname=AtollWatchdog", "severity=none"], "watchdog"),
    ],
)
def test_severities_have_their_receivers(labels, receiver):
    words = ["amtool", "config", "routes", "test", f"--config.file={CONFIG}", *labels]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == receiver


def test_the_configuration_is_valid_and_names_existing_alerts():
    done = subprocess.run(["amtool", "check-config", str(CONFIG)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = yaml.safe_load(CONFIG.read_text())
    named = [word for rule in told["inhibit_rules"] for side in ("source", "target")
             for matcher in rule[f"{side}_matchers"] for word in matcher.split('"')[1].split("|")]  # fmt: skip
    assert named
    assert set(named) <= set(alerts())
    assert all("run" in rule["equal"] for rule in told["inhibit_rules"]), "a run must not mute another run"


def test_compose_starts_alertmanager_with_this_configuration():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    assert "./alertmanager:/etc/alertmanager:ro" in services["alertmanager"]["volumes"]
    scraped = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yaml").read_text())
    (targets,) = scraped["alerting"]["alertmanagers"][0]["static_configs"]
    assert targets["targets"] == ["alertmanager:9093"]
    assert set(services["alertmanager"]["networks"]) & set(services["prometheus"]["networks"])
    for job in scraped["scrape_configs"]:
        assert job["relabel_configs"] == [{"target_label": "run", "replacement": "demo"}], job["job_name"]
