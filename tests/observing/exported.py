"""The series that processes export to Prometheus, with their labels, and the values of labels with fixed values."""

from __future__ import annotations

from atoll.stats import Counters, LearnerMetrics
from atoll_server.access.quotas import LIMITS
from atoll_server.front.metrics import FrontMetrics
from atoll_server.learners.goodput import CAUSES
from atoll_server.rounds.syncer_events import Cause
from atoll_server.telemetry.metrics import SAMPLED, Metrics
from atoll_wire.contract import LearnerState
from atoll_wire.layout.frame_spans import Codec
from atoll_wire.process.certificate_expiry import CertificateExpiry
from prometheus_client import CollectorRegistry, ProcessCollector

Labels = dict[str, set[str]]  # label -> allowed values; an empty set for any value
TARGET: Labels = {  # labels that Prometheus adds
    "job": {"atoll-core", "atoll-front", "atoll-learner"},
    "run": set(),
    "namespace": set(),
    "instance": set(),
    "pod": set(),
}
FIXED: Labels = {
    "state": set(LearnerState),
    "direction": {"up", "down", "whole"},
    "codec": {codec.name.lower() for codec in Codec},
    "limit": set(LIMITS),
    "fate": {"accepted", "merged", "refused", "turned_away"},
    "outcome": {"merged", "lapsed"},
    "kind": {"contribution", "update", "whole"},
    "type": {"front", "learner"},
    "file": {"cert.pem", "ca.pem"},
}
CLOSED = {cause.value for cause in Cause}
BY_PROMETHEUS: dict[str, Labels] = {
    "up": {},
    "ALERTS": {
        "alertname": set(),
        "alertstate": {"pending", "firing"},
        "severity": set(),
        "learner": set(),
        "region": set(),
    },
}


def registries() -> dict[str, CollectorRegistry]:
    """Returns the registries of a core, a front and a learner, with at least one sample of each metric."""
    core, front, learner = Metrics(), FrontMetrics("eu"), CollectorRegistry()
    core.moved("eu", "up", Codec.INT4, 1)
    for name, _, labels, _ in SAMPLED:
        core.read.set(name, 1.0, *labels)
    front.learner("a", "up").inc()
    front.refused.labels("unavailable").inc()
    learner.register(LearnerMetrics(Counters(), "a", "eu"))
    ProcessCollector(registry=learner)
    for registry in (core.registry, front.registry, learner):
        registry.register(CertificateExpiry(lambda: {"cert.pem": 0.0, "ca.pem": 0.0}))
    return {"Core": core.registry, "Front": front.registry, "Learner": learner}


def exported() -> dict[str, Labels]:
    """Returns the labels of each series of all three processes."""
    found = {name: dict(labels) for name, labels in BY_PROMETHEUS.items()}
    for registry in registries().values():
        for family in registry.collect():
            for sample in family.samples:
                found[sample.name] = {label: _values(sample.name, label) for label in sample.labels}
    return {name: labels | TARGET for name, labels in found.items()}


def _values(name: str, label: str) -> set[str]:
    if label == "cause":
        return CLOSED if "closed" in name else set(CAUSES)
    return FIXED.get(label, set())
