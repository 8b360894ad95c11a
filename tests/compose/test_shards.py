"""The profile `shards` of docker/compose.yaml: `atoll` accepts its commands, and certificates cover its names."""

from __future__ import annotations

import yaml

from tests.compose.stack import ROOT
from tests.k8s.cases import parsed

SHARDS = ("shard-0", "shard-1", "shard-2")


def test_three_shards_start_with_their_numbers_and_one_registrar():
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    certificates = (ROOT / "docker/certs.py").read_text()
    for number, name in enumerate(SHARDS):
        said = parsed([*services[name]["command"], "--dir", "run"])
        assert (str(said["shard"]), said["advertise"]) == (f"{number}/3", f"{name}:7070")
        assert said["registrar"] == (None if number == 0 else "shard-0:7070")
        given = set(services[name]["environment"]) - {"ATOLL_CORE_DIR", "ATOLL_CORE_REVOKED", "ATOLL_TLS"}
        assert given == ({"ATOLL_CORE_TOTAL_TOKENS"} if number == 0 else set()), "only the registrar has run settings"
        assert f"{name}:/var/lib/atoll" in services[name]["volumes"]
        assert f'"{name}"' in certificates
    assert parsed(services["front-near"]["command"])["core"] == "shard-0:7070"
    assert parsed(services["learner-near"]["command"])["server"] == ["front-near:7071"]
    assert "home" not in services["learner-near"]["networks"]
    for name in (*SHARDS, "front-near", "learner-near"):
        assert services[name]["profiles"] == ["shards"]
