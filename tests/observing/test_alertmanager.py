"""The shipped configuration of Alertmanager: routes, and a real Alertmanager that mutes what follows from a fault."""

from __future__ import annotations

import json
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
    "a lost region, and a silent learner in another": (
        [DEAD, SILENT, SILENT | {"region": "eu"}], [DEAD, SILENT | {"region": "eu"}]),
    "no learner trains": (
        [{"alertname": "AtollNoLearnerLive", "run": "a", "severity": "critical"}, SILENT],
        [{"alertname": "AtollNoLearnerLive", "run": "a", "severity": "critical"}]),
}  # fmt: skip


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
    body = json.dumps([{"labels": labels} for labels in firing]).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=20).close()

    def active() -> list[dict[str, str]]:
        return [each["labels"] for each in _get(f"{url}?inhibited=false")]

    eventually(lambda: len(_get(url)) == len(firing) and len(active()) == len(notifying))
    assert sorted(map(str, map(sorted_items, active()))) == sorted(map(str, map(sorted_items, notifying)))


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
