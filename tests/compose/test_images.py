"""One service of docker/compose.yaml builds each image, and every selection of services builds the images it needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import yaml

from tests.compose.stack import ROOT

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
OWN = {name: each for name, each in SERVICES.items() if each["image"].startswith("atoll-")}
IN_A_RUN = {"operator", "operator-token"}  # commands for a run that exists


def test_one_service_builds_each_image():
    """Compose writes a service's name into the image, so with two builders each build would recreate containers."""
    builders = Counter(each["image"] for each in OWN.values() if "build" in each)
    assert builders == dict.fromkeys({each["image"] for each in OWN.values()}, 1)


@pytest.mark.parametrize("name", sorted(OWN.keys() - IN_A_RUN))
def test_a_service_alone_builds_its_image(name):
    """`docker compose up SERVICE` selects only the service and what it depends on."""
    selected, rest = set[str](), [name]
    while rest:
        at = rest.pop()
        if at not in selected:
            selected.add(at)
            rest += SERVICES[at].get("depends_on", {})
    assert any("build" in SERVICES[each] and SERVICES[each]["image"] == OWN[name]["image"] for each in selected)


@pytest.mark.parametrize("name", OWN)
def test_no_image_of_ours_is_pulled_from_a_public_registry(name):
    assert "build" in OWN[name] or OWN[name]["pull_policy"] == "never"
