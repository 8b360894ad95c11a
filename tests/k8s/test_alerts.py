"""Monitoring: alert rules for the deployed components, Grafana's dashboards, and Prometheus' targets."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.k8s.cases import one
from tests.k8s.engine import ROOT
from tests.observing.exported import TARGET
from tests.observing.promql import promtool, series

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]
RULES = ROOT / "docker/prometheus/rules.yaml"
BOARDS = sorted((ROOT / "docker/grafana/dashboards").glob("*.json"))
MAX_ANNOTATED = 262_144  # bytes, because `kubectl apply` stores the whole object in an annotation


def _groups(answer: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {group["name"]: group["rules"] for group in one(answer, "PrometheusRule", "atoll")["spec"]["groups"]}


def _unscoped(groups: dict[str, list[dict[str, Any]]]) -> Any:
    """Returns the groups without the label run in their expressions."""
    return json.loads(re.sub(r'run=\\"[^"]*\\"(, )?', "", json.dumps(groups)).replace("{}", ""))


def test_rules_are_deployed_unchanged_except_for_their_scope(rendered):
    """tests/observing tests each rule, and compares its series with those that the processes export."""
    kept = {group["name"]: group["rules"] for group in yaml.safe_load(RULES.read_text())["groups"]}
    made = json.dumps(_unscoped(_groups(rendered["everything"])))
    assert kept == json.loads(made.replace("https://atoll.example.com/runbooks", "http://localhost:7080/runbooks"))
    assert set(kept) == TARGET["job"] | {"atoll-all"}


def test_rules_see_only_their_own_run(rendered):
    """Two releases on one Prometheus would otherwise send the same alerts twice, with different runbooks."""
    for name, run in {"everything": "atoll/atoll", "other monitoring.run": "x"}.items():
        for rules in _groups(rendered[name]).values():
            for rule in rules:
                found = list(series(rule["expr"]))
                assert found or rule["expr"] == "vector(1)", rule
                assert all(f'run="{run}"' in inside for _, inside in found), rule["expr"]


def test_promtool_accepts_the_deployed_rules_and_their_cases(rendered, tmp_path):
    """The cases of docker/prometheus/tests, for the run of this release."""
    groups = one(rendered["other monitoring.run"], "PrometheusRule", "atoll")["spec"]["groups"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}).replace('run="x"', 'run="a"'))
    promtool("check", "rules", str(tmp_path / "rules.yaml"))
    cases = yaml.safe_load((ROOT / "docker/prometheus/tests/scenes.yaml").read_text())
    cases["rule_files"] = ["rules.yaml"]
    cases["tests"] = [case for case in cases["tests"] if "two runs" not in case["name"]]
    (tmp_path / "scenes.yaml").write_text(yaml.safe_dump(cases))
    promtool("test", "rules", str(tmp_path / "scenes.yaml"))


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
    assert set(_groups(rendered["home"])) == {"atoll-core", "atoll-front", "atoll-all"}
    assert set(_groups(rendered["other core.enabled"])) == {"atoll-front", "atoll-learner", "atoll-all"}


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
    (endpoint,) = monitor["podMetricsEndpoints"]
    asked, (job, run) = endpoint["port"], endpoint["relabelings"]
    assert (job["sourceLabels"], job["targetLabel"]) == (["job"], "job")
    assert run == {"targetLabel": "run", "replacement": "atoll/atoll"}
    for each in rendered["everything"]["objects"]:
        if each["kind"] in {"StatefulSet", "Deployment"}:
            template = each["spec"]["template"]
            assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            if asked in {port["name"] for port in template["spec"]["containers"][0]["ports"]}:
                jobs.add(job["replacement"].replace("$1", template["metadata"]["labels"][monitor["jobLabel"]]))
    assert jobs == TARGET["job"]


def test_without_monitoring_there_are_no_rules_or_dashboards(rendered):
    kinds = {each["kind"] for each in rendered["remote"]["objects"]}
    assert not kinds & {"PodMonitor", "PrometheusRule", "ConfigMap"}
