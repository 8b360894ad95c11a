"""Alerts: of what there is, for what runs here, each with its remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest
from atoll.stats import Counters, LearnerMetrics
from atoll_server.front.metrics import FrontMetrics
from atoll_server.gauges import STATES
from atoll_server.metrics import Metrics
from prometheus_client import CollectorRegistry

from tests.k8s.cases import one

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


def _groups(answer: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    return {group["name"]: group["rules"] for group in one(answer, "PrometheusRule", "atoll")["spec"]["groups"]}


def _series() -> dict[str, set[str]]:
    """What the processes tell: group -> names."""
    learner = CollectorRegistry()
    learner.register(LearnerMetrics(Counters(), "a"))
    registries = {"core": Metrics().registry, "front": FrontMetrics("eu").registry, "learner": learner}
    return {
        f"atoll-{part}": {family.name + suffix for family in registry.collect() for suffix in SUFFIXES[family.type]}
        for part, registry in registries.items()
    }


def test_alerts_ask_for_series_that_there_are(rendered):
    groups, series = _groups(rendered["everything"]), _series()
    assert set(groups) == set(series)
    for name, rules in groups.items():
        for rule in rules:
            asked = set(re.findall(r"atoll_\w+", rule["expr"]))
            assert asked, rule["alert"]
            assert asked <= series[name], rule["alert"]
            states = {state for found in re.findall(r'state=~?"([^"]*)"', rule["expr"]) for state in found.split("|")}
            assert states <= set(STATES), rule["alert"]


def test_each_says_what_it_is_and_what_helps(rendered):
    alerts = [rule for rules in _groups(rendered["everything"]).values() for rule in rules]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert len(rule["annotations"]["summary"]) < 100
        assert len(rule["annotations"]["description"]) > 50


def test_alerts_are_of_what_runs_here(rendered):
    """A cluster without a core must not miss it."""
    assert set(_groups(rendered["home"])) == {"atoll-core", "atoll-front"}
    assert set(_groups(rendered["other core.enabled"])) == {"atoll-front", "atoll-learner"}


def test_all_pods_are_asked(rendered):
    monitor = one(rendered["everything"], "PodMonitor", "atoll")["spec"]
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == ["metrics"]
    for each in rendered["everything"]["objects"]:
        if each["kind"] in {"StatefulSet", "Deployment"}:
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert monitor["selector"]["matchLabels"].items() <= labels.items()


def test_there_is_none_where_none_is_wanted(rendered):
    kinds = {each["kind"] for each in rendered["remote"]["objects"]}
    assert not kinds & {"PodMonitor", "PrometheusRule"}
