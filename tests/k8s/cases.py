"""Chart values that the tests try, and functions that find objects in the rendered chart."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from atoll.commands import register as register_learner
from atoll_dashboard.commands import register as register_dashboard
from atoll_server.cli.certs import register as register_certs
from atoll_server.cli.commands import register as register_core
from atoll_server.front.commands import register as register_front

from tests.k8s.engine import CHART

Values = list[str | dict[str, Any]]

EVERYTHING: dict[str, Any] = {
    "region": "eu",
    "tls": {"certManager": {"enabled": True, "issuerRef": {"name": "atoll"}}, "revokedConfigMap": "revoked"},
    "core": {
        "operatorTokensSecret": "operators", "service": {"type": "LoadBalancer"},
        "hosts": ["core.example.com", "192.0.2.7"],
        "settings": {"innerSteps": 48, "quorum": "60%", "maxStaleness": 1_000_000, "outerLr": 0.7, "codec": "int8"},
    },
    "front": {"enabled": True, "cacheMib": 2_000_000, "service": {"type": "LoadBalancer"}},
    "learner": {"enabled": True},
    "dashboard": {
        "enabled": True, "pricePerGb": 1_000_000,
        "ingress": {"enabled": True, "host": "atoll.example.com", "tlsSecret": "atoll-page"},
    },
    "networkPolicy": {
        "dashboardFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
    },
    "monitoring": {"enabled": True},
}  # fmt: skip

# Each value of the chart, with another setting than in EVERYTHING, which must change some object.
OTHERS: dict[str, Any] = {
    "fullnameOverride": "other", "region": "us",
    "image.registry": "registry.example.com", "image.tag": "9", "image.pullPolicy": "Always",
    "image.pullSecrets": ["x"],
    "tls.certManager.enabled": False, "tls.certManager.issuerRef.name": "x",
    "tls.certManager.issuerRef.kind": "ClusterIssuer", "tls.certManager.issuerRef.group": "x.example.com",
    "tls.revokedConfigMap": "x",
    "core.enabled": False, "core.shards": 2, "core.standby": True, "core.viewerTlsSecret": "x",
    "core.shardDomain": "shards.example.com",
    "core.hosts": ["x"], "core.operatorTokensSecret": "x", "core.extraArgs": ["--record"],
    "core.backup.enabled": True, "core.backup.everySeconds": 60, "core.backup.keep": 9,
    "core.backup.storage.size": "2Ti", "core.backup.storage.storageClassName": "slow",
    "core.backup.storage.existingClaim": "x",
    "core.backup.volume": {"nfs": {"server": "x", "path": "/"}},
    "core.backup.resources.requests": {"cpu": "7"}, "core.backup.resources.limits": {"memory": "7Gi"},
    "core.storage.size": "1Ti", "core.storage.storageClassName": "fast", "core.storage.existingClaim": "x",
    "core.persistentVolumeClaimRetentionPolicy.whenDeleted": "Delete",
    "core.persistentVolumeClaimRetentionPolicy.whenScaled": "Delete", "core.restoreSeconds": 60,
    "core.settings.preset": "finetune",
    "core.settings.innerSteps": 12, "core.settings.fragments": 8, "core.settings.overlap": 1.5,
    "core.settings.quorum": 3, "core.settings.graceRatio": 0.5, "core.settings.stalenessExponent": 1,
    "core.settings.maxStaleness": 8, "core.settings.outerLr": 1,
    "core.settings.outerMomentum": 0.9, "core.settings.outerWarmUp": 50,
    "core.settings.outerCoolDown": 0.2, "core.settings.totalTokens": 1000000000,
    "core.settings.normLimit": 0, "core.settings.clipNorm": 5, "core.settings.weightLimit": 2,
    "core.settings.codec": "float32", "core.settings.compression": "never",
    "core.settings.keepSnapshots": 5, "core.settings.record": True,
    "core.service.type": "ClusterIP",
    "front.enabled": False, "front.replicas": 3, "front.hosts": ["x"], "front.core": "x:1", "front.cacheMib": 1,
    "front.extraArgs": ["--log-json"], "front.service.type": "ClusterIP",
    "learner.enabled": False, "learner.replicas": 9, "learner.servers": ["x:1"], "learner.size": "tiny",
    "learner.command": ["x"], "learner.args": ["x"], "learner.extraArgs": ["--batch=2"],
    "learner.gpus": 0,
    "learner.runtimeClassName": "nvidia", "learner.shmSize": "1Gi", "learner.tmpSize": "1Gi",
    "dashboard.enabled": False, "dashboard.server": "x:1", "dashboard.hosts": ["x"], "dashboard.pricePerGb": 0.02,
    "dashboard.url": "https://x", "dashboard.history.enabled": False, "dashboard.history.storage.size": "2Gi",
    "dashboard.history.storage.storageClassName": "slow", "dashboard.history.storage.existingClaim": "x",
    "dashboard.extraArgs": ["--log-json"], "dashboard.ingress.enabled": False, "dashboard.ingress.className": "x",
    "dashboard.ingress.host": "x", "dashboard.ingress.tlsSecret": "", "dashboard.ingress.annotations": {"x": "y"},
    "networkPolicy.enabled": False, "networkPolicy.coreFrom": [{"podSelector": {}}],
    "networkPolicy.frontFrom": [{"podSelector": {}}], "networkPolicy.dashboardFrom": [{"podSelector": {}}],
    "networkPolicy.upstreamTo": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
    "networkPolicy.learnerEgress": [{"ports": [{"port": 443}]}], "networkPolicy.monitoringNamespace": "",
    "networkPolicy.dnsPort": 5353,
    "monitoring.enabled": False, "monitoring.labels": {"x": "y"}, "monitoring.run": "x",
    "monitoring.interval": "1m",
}  # fmt: skip
DIGEST = "sha256:" + 64 * "a"
PARTS = ("core", "front", "learner", "dashboard")
for _part in PARTS:
    OTHERS |= {
        f"{_part}.tlsSecret": "x", f"{_part}.terminationGracePeriodSeconds": 999,
        f"{_part}.resources.requests": {"cpu": "7"}, f"{_part}.resources.limits": {"memory": "7Gi"},
        f"{_part}.serviceAccountAnnotations": {"x": "y"}, f"{_part}.podAnnotations": {"x": "y"},
        f"{_part}.nodeSelector": {"x": "y"}, f"{_part}.tolerations": [{"operator": "Exists"}],
        f"{_part}.affinity": {"nodeAffinity": {}}, f"{_part}.podLabels": {"x": "y"},
        f"{_part}.priorityClassName": "x", f"{_part}.image.repository": "x.example.com/x",
        f"{_part}.image.tag": "x", f"{_part}.image.digest": DIGEST,
        f"{_part}.extraEnv": [{"name": "X", "value": "x"}],
        f"{_part}.extraVolumes": [{"name": "x", "emptyDir": {}}],
        f"{_part}.extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
    }  # fmt: skip
OTHERS |= {f"{_part}.service.annotations": {"x": "y"} for _part in ("core", "front", "dashboard")}
OTHERS |= {f"{_part}.service.loadBalancerSourceRanges": ["192.0.2.0/24"] for _part in ("core", "front")}
IN_SHARDS = {"core.shardDomain"}  # these have an effect only with several shards
IN_BACKUP = "core.backup."  # these have an effect only with backups
ELSEWHERE = {"core.enabled", "networkPolicy.upstreamTo"}  # these have an effect only with a core elsewhere

# Name -> values, and a part of the expected refusal.
REFUSED: dict[str, tuple[Values, str]] = {
    "a name that is misspelt": ([{"core": {"replica": 2}}], "additional properties 'replica' not allowed"),
    "a part that does not exist": ([{"cor": {}}], "additional properties 'cor' not allowed"),
    "a setting that is misspelt": ([{"core": {"settings": {"innerStep": 2}}}], "'innerStep' not allowed"),
    "a setting that cannot be": ([{"core": {"settings": {"outerMomentum": 1}}}], "/core/settings/outerMomentum"),
    "a codec that does not exist": ([{"core": {"settings": {"codec": "int2"}}}], "'int4', 'int8', 'float32'"),
    "text where a number belongs": ([{"front": {"replicas": "two"}}], "got string, want integer"),
    "a core without its port": ([{"front": {"core": "core.example.com"}}], "/front/core"),
    "no core": (["values-remote.yaml", {"front": {"core": ""}}], "front.core is required if core.enabled is false"),
    "no region": ([{"front": {"enabled": True}}], "region is required if a front or learner is enabled"),
    "nothing": ([{"core": {"enabled": False}}], "nothing is enabled: set core.enabled, front.enabled,"),
    "no issuer": ([{"tls": {"certManager": {"enabled": True}}}], "tls.certManager.issuerRef.name is required"),
    "a dashboard without a core": (
        [{"core": {"enabled": False}, "dashboard": {"enabled": True}}],
        "dashboard.server is required if core.enabled is false",
    ),
    "an ingress without a host": (
        [{"dashboard": {"enabled": True, "ingress": {"enabled": True}}}],
        "dashboard.ingress.host is required",
    ),
    "an ingress that may not call": (
        [{"dashboard": {"enabled": True, "ingress": {"enabled": True, "host": "atoll.example.com"}}}],
        "networkPolicy.dashboardFrom is required with dashboard.ingress.enabled",
    ),
    "a digest without its kind": ([{"core": {"image": {"digest": 64 * "a"}}}], "/core/image/digest"),
    "a tag in a repository": ([{"core": {"image": {"repository": "x@sha256:1"}}}], "/core/image/repository"),
    "a label that selects pods": (
        [{"core": {"podLabels": {"app.kubernetes.io/name": "x"}}}],
        "invalid propertyName 'app.kubernetes.io/name'",
    ),
    "one claim for several shards": (
        [{"core": {"shards": 2, "storage": {"existingClaim": "x"}}}],
        "core.storage.existingClaim cannot be combined with core.shards above 1",
    ),
    "two volumes for backups": (
        [{"core": {"backup": {"volume": {"emptyDir": {}}, "storage": {"existingClaim": "x"}}}}],
        "core.backup.volume and core.backup.storage.existingClaim both name a volume",
    ),
    "backups that are all removed": ([{"core": {"backup": {"keep": 0}}}], "/core/backup/keep"),
    "no shards": ([{"core": {"shards": 0}}], "/core/shards"),
    "a domain that a wildcard cannot cover": ([{"core": {"shardDomain": "shards"}}], "/core/shardDomain"),
    "a public page": ([{"dashboard": {"service": {"type": "LoadBalancer"}}}], "'type' not allowed"),
    "an address that ends in a slash": ([{"dashboard": {"url": "https://atoll.example.com/"}}], "/dashboard/url"),
    "a learner without servers": (
        [{"region": "eu", "core": {"enabled": False}, "learner": {"enabled": True}}],
        "learner.servers is required unless front.enabled or core.enabled is true",
    ),
}


def _changed(path: str, value: Any) -> Values:
    """Returns EVERYTHING with one changed value."""
    for name in reversed(path.split(".")):
        value = {name: value}
    more = [UPSTREAM] if path in ELSEWHERE else [SHARDS] if path in IN_SHARDS else []
    more += [BACKUP] if path.startswith(IN_BACKUP) and path != "core.backup.enabled" else []
    return [EVERYTHING, *more, value]


SHARDS: dict[str, Any] = {"core": {"shards": 3}}
BACKUP: dict[str, Any] = {"core": {"backup": {"enabled": True}}}


UPSTREAM: dict[str, Any] = {
    part: {option: "core.example.com:7070"} for part, option in {"front": "core", "dashboard": "server"}.items()
}
CASES: dict[str, Values] = {
    "default": [],
    "home": ["values-home.yaml"],
    "remote": ["values-remote.yaml"],
    "everything": [EVERYTHING],
    "learner alone": [
        {"region": "eu", "core": {"enabled": False}, "learner": {"enabled": True, "servers": ["a:7071", "b:7072"]}}
    ],
    "dashboard alone": [
        {"core": {"enabled": False}, "dashboard": {"enabled": True, "server": "core.example.com:7070"}}
    ],
    "dashboard at another address": ["values-home.yaml", {"dashboard": {"url": "https://example.com/atoll"}}],
    "learners at the core": [{"region": "eu", "learner": {"enabled": True}}],
    "as a dependency": [{"global": {"anything": 1}}],
    "elsewhere": [EVERYTHING, UPSTREAM],
    "shards": [EVERYTHING, SHARDS],
    "backup": [EVERYTHING, BACKUP],
    "backup of shards": [EVERYTHING, SHARDS, BACKUP],
    "backup to a volume": [EVERYTHING, BACKUP, {"core": {"backup": {"volume": {"nfs": {"server": "x", "path": "/"}}}}}],
    "standby": [EVERYTHING, {"core": {"standby": True}}],
    "standby of shards": [EVERYTHING, SHARDS, {"core": {"standby": True}}],
    "own claims": [
        EVERYTHING,
        BACKUP,
        {"core": {"storage": {"existingClaim": "run"}, "backup": {"storage": {"existingClaim": "backups"}}}},
    ],
    "shards without cert-manager": [EVERYTHING, SHARDS, {"tls": {"certManager": {"enabled": False}}}],
}
CASES |= {name: values for name, (values, _) in REFUSED.items()}
CASES |= {f"other {path}": _changed(path, value) for path, value in OTHERS.items()}
SOUND = [name for name in CASES if name not in REFUSED]


def schema() -> dict[str, Any]:
    """Returns the schema of the chart's values."""
    return json.loads((CHART / "values.schema.json").read_text())  # type: ignore[no-any-return]


def leaves() -> Iterator[str]:
    """Yields the path of each value that a user may set, except a parent chart's."""
    whole = schema()

    def walk(part: dict[str, Any], path: str) -> Iterator[str]:
        part = whole["definitions"][Path(part["$ref"]).name] if "$ref" in part else part
        for name, each in part.get("properties", {}).items():
            yield from walk(each, f"{path}.{name}")
        if "properties" not in part:
            yield path[1:]

    return (each for each in walk(whole, "") if each != "global")


def one(answer: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    """Returns the rendered object of this kind and name."""
    (found,) = [each for each in answer["objects"] if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found  # type: ignore[no-any-return]


def pods(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the pod templates by component."""
    return {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]["spec"]
        for each in answer["objects"]
        if each["kind"] in {"StatefulSet", "Deployment"}
    }


@functools.cache
def program() -> Any:
    """Returns the command `atoll` as a click object."""
    app = typer.Typer()
    for register in (register_core, register_front, register_learner, register_dashboard, register_certs):
        register(app)
    return typer.main.get_command(app)


def parsed(words: list[str]) -> dict[str, Any]:
    """Parses the words with `atoll`'s options. Raises click's UsageError for unknown options."""
    name, *rest = words
    command = program().commands[name]
    if hasattr(command, "commands"):
        name, *rest = rest
        command = command.commands[name]
    return command.make_context(name, rest).params  # type: ignore[no-any-return]
