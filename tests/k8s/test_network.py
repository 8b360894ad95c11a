"""The network policies: which pods may call which pods."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s.cases import PARTS, one

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(600)]
DNS, METRICS = 53, 9100
MONITORING = "monitoring"


def _rules(rules: list[dict[str, Any]], side: str) -> dict[int, list[str]]:
    """Returns the peers of each port, as one word each, or "anywhere" for rules without peers."""
    found: dict[int, list[str]] = {}
    for rule in rules:
        who = [_who(peer) for peer in rule[side]] if side in rule else ["anywhere"]
        assert who, "a rule with an empty list allows all peers"
        for port in {each["port"] for each in rule["ports"]}:
            found.setdefault(port, []).extend(who)
    return found


def _who(peer: dict[str, Any]) -> str:
    if "ipBlock" in peer:
        return str(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        return str(peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"])
    labels = peer["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/instance"] == "atoll", "a policy must select only this release"
    return str(labels["app.kubernetes.io/component"])


def _policy(answer: dict[str, Any], part: str) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Returns the inbound and the outbound rules."""
    policy = one(answer, "NetworkPolicy", f"atoll-{part}")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == part
    return _rules(policy["ingress"], "from"), _rules(policy["egress"], "to")


def test_a_core_accepts_calls_from_fronts_and_makes_none(rendered):
    called = {7070: ["front", "dashboard", "203.0.113.0/24", "test"], METRICS: [MONITORING]}
    assert _policy(rendered["home"], "core") == (called, {})
    assert _policy(rendered["default"], "core") == ({7070: ["front", "test"], METRICS: [MONITORING]}, {})


def test_shards_call_the_registrar(rendered):
    inbound, outbound = _policy(rendered["shards"], "core")
    assert inbound[7070] == ["front", "core", "dashboard", "test"]
    assert outbound == {DNS: ["anywhere"], 7070: ["core"]}


def test_a_front_is_called_by_learners_and_calls_the_core(rendered):
    called = {7071: ["learner", "test"], METRICS: [MONITORING]}
    alone = called | {7071: ["learner"]}
    assert _policy(rendered["home"], "front") == (alone, {DNS: ["anywhere"], 7070: ["core"]})
    assert _policy(rendered["remote"], "front") == (called, {DNS: ["anywhere"], 7070: ["anywhere"]})
    narrow = _policy(rendered["other networkPolicy.upstreamTo"], "front")
    assert narrow == (called, {DNS: ["anywhere"], 7070: ["192.0.2.0/24"]})


def test_a_learner_accepts_no_calls_and_calls_fronts_and_stores(rendered):
    asked = {METRICS: [MONITORING]}
    assert _policy(rendered["remote"], "learner") == (asked, {DNS: ["anywhere"], 7071: ["front"], 443: ["anywhere"]})
    assert _policy(rendered["everything"], "learner") == (asked, {DNS: ["anywhere"], 7071: ["front"]})
    alone = _policy(rendered["learner alone"], "learner")
    assert alone == (asked, {DNS: ["anywhere"], 7071: ["anywhere"], 7072: ["anywhere"]})


def test_learners_without_fronts_may_call_the_core(rendered):
    assert _policy(rendered["learners at the core"], "core")[0][7070] == ["front", "learner", "test"]
    assert _policy(rendered["learners at the core"], "learner")[1][7070] == ["core"]


def test_a_dashboard_accepts_calls_from_named_peers_and_calls_the_core(rendered):
    assert _policy(rendered["home"], "dashboard") == ({}, {DNS: ["anywhere"], 7070: ["core"]})
    assert _policy(rendered["everything"], "dashboard") == ({7080: ["ingress"]}, {DNS: ["anywhere"], 7070: ["core"]})
    assert _policy(rendered["dashboard alone"], "dashboard") == ({}, {DNS: ["anywhere"], 7070: ["anywhere"]})
    assert "dashboard" not in _policy(rendered["elsewhere"], "core")[0][7070], "this dashboard calls another core"


def test_without_monitoring_no_peer_may_read_metrics(rendered):
    for part in PARTS:
        assert METRICS not in _policy(rendered["other networkPolicy.monitoringNamespace"], part)[0]


def test_network_policies_can_be_disabled(rendered):
    kinds = [each["kind"] for each in rendered["other networkPolicy.enabled"]["objects"]]
    assert "NetworkPolicy" not in kinds


def test_test_pods_call_the_core_and_what_learners_call(rendered):
    def calls(name: str) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
        return _policy(rendered[name], "test")

    assert calls("home") == ({}, {DNS: ["anywhere"], 7070: ["core"]})
    assert calls("remote") == ({}, {DNS: ["anywhere"], 7071: ["front"]})
    assert calls("learner alone") == ({}, {DNS: ["anywhere"], 7071: ["anywhere"], 7072: ["anywhere"]})
    assert not any(each["metadata"]["name"] == "atoll-test" for each in rendered["dashboard alone"]["objects"])
