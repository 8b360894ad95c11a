"""Every service of docker/compose.yaml has limits on memory, threads and logs."""

from __future__ import annotations

import pytest
import yaml

from tests.compose.stack import ROOT

SERVICES = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_limits(name):
    service = SERVICES[name]
    assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}
    assert service["pids_limit"] in {1024, 4096}
    assert service["mem_limit"]
