"""Monitoring: alert rules for the deployed components, Grafana's dashboards, and Prometheus' targets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.k8s.cases import one
from tests.k8s.engine import ROOT
from tests.observing.exported import TARGET

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]
RULES = ROOT / "docker/prometheus/rules.yaml"
BOARDS = sorted((ROOT / "docker/grafana/dashboards").glob("*.json"))
MAX_ANNOTATED = 262_144  # bytes, because `kubectl apply` stores the whole object in an annotation


def _groups(answer: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {group["name"]: group["rules"] for group in one(answer, "PrometheusRule", "atoll")["spec"]["groups"]}


def test_rules_are_deployed_unchanged(rendered):
    """tests/observing tests each rule, and compares its series with those that the processes export."""
    kept = {group["name"]: group["rules"] for group in yaml.safe_load(RULES.read_text())["groups"]}
    made = json.dumps(_groups(rendered["everything"]))
    assert kept == json.loads(made.replace("https://atoll.example.com/runbooks", "http://localhost:7080/runbooks"))
    assert set(kept) == {f"atoll-{part}" for part in TARGET["job"]}


def test_runbook_urls_begin_with_the_dashboards_address(rendered):
    for name, address in {
        "home": "http://localhost:7080",
        "everything": "https://atoll.example.com",
        "other dashboard.ingress.tlsSecret": "http://atoll.example.com",
        "other dashboard.url": "https://x",
        "dashboard at another address": "https://example.com/atoll",
    }.items():
        alerts = [rule for rules in _groups(rendered[name]).values() for rule in rules if "alert" in rule]
        assert alerts
        for alert in alerts:
            assert alert["annotations"]["runbook_url"] == f"{address}/runbooks#{alert['alert'].lower()}"


def test_rules_match_the_deployed_components(rendered):
    """A cluster without a core must not alert on a missing core."""
    assert set(_groups(rendered["home"])) == {"atoll-core", "atoll-front"}
    assert set(_groups(rendered["other core.enabled"])) == {"atoll-front", "atoll-learner"}


def test_dashboards_are_deployed_unchanged(rendered):
    """Grafana's sidecar writes each key to a file in one folder, which other charts share."""
    made = [each for each in rendered["everything"]["objects"] if each["kind"] == "ConfigMap"]
    assert len(made) == len(BOARDS) > 0
    for path in BOARDS:
        found = one(rendered["everything"], "ConfigMap", f"atoll-grafana-{path.stem}")
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert list(found["data"]) == [f"atoll-{path.name}"]
        assert json.loads(found["data"][f"atoll-{path.name}"]) == json.loads(path.read_text())
        assert len(json.dumps(found)) < MAX_ANNOTATED


def test_all_pods_with_metrics_are_scraped(rendered):
    """The pods' job names are those in the rules and dashboards."""
    monitor, jobs = one(rendered["everything"], "PodMonitor", "atoll")["spec"], set()
    (asked,) = [each["port"] for each in monitor["podMetricsEndpoints"]]
    for each in rendered["everything"]["objects"]:
        if each["kind"] in {"StatefulSet", "Deployment"}:
            template = each["spec"]["template"]
            assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            if asked in {port["name"] for port in template["spec"]["containers"][0]["ports"]}:
                jobs.add(template["metadata"]["labels"][monitor["jobLabel"]])
    assert jobs == TARGET["job"]


def test_without_monitoring_there_are_no_rules_or_dashboards(rendered):
    kinds = {each["kind"] for each in rendered["remote"]["objects"]}
    assert not kinds & {"PodMonitor", "PrometheusRule", "ConfigMap"}
