"""`make test-newest` and `make test-oldest` install the versions in pyproject.toml and on the compatibility page."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from atoll_server.ledger.database import SCHEMA_VERSION
from atoll_wire.contract import PROTOCOL
from atoll_wire.layout.layout import FORMAT
from packaging.requirements import Requirement

from tests.versions import FRAMEWORKS, ROOT, floor, needed, pythons, torches, trainers


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_each_requirement_has_one_floor_that_can_be_installed(version):
    floors = dict(floor(each).split("==") for each in needed(version))
    assert {"grpcio", "protobuf", "numba", "numpy", "psutil", "fastapi"} <= set(floors)
    assert not {"atoll", "torch"} & set(floors)
    assert floors["numpy"] == ("2.1" if version == "3.13" else "1.26")


def test_a_requirement_without_a_floor_is_an_error():
    with pytest.raises(ValueError, match="not enough values"):
        floor(Requirement("grpcio<2"))


def test_cpu_builds_of_torch_are_tried_from_the_floor_on():
    oldest, pinned = torches("oldest")
    assert oldest == "torch==2.6.0+cpu", "the first version with torch.distributed.fsdp.fully_shard"
    assert pinned == next(torches("newest")) != oldest


def test_the_running_python_is_found():
    assert any(version in {"3.11", "3.12", "3.13", "3.14"} for version, _ in pythons())


PAGE = (ROOT / "docs/project/compatibility.md").read_text()


def test_the_compatibility_page_has_the_allowed_and_pinned_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name in ("numerics", "learner", "dashboard") for each in project["optional-dependencies"][name]]
    wanted = {}
    for each in map(Requirement, [*project["dependencies"], *extras]):
        wanted.setdefault(each.name, set()).update(str(each.specifier).split(","))
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    rows = re.findall(r"^\| (\w+) \| ([^|]*[<>]=[^|]*) \| ([^|]*) \|", PAGE, re.MULTILINE)
    assert rows[0][:2] == ("Python", project["requires-python"])
    assert len(rows) > 5
    for name, allowed, pin in rows[1:]:
        excluded = {f"!={version}" for version in re.findall(r"not ([\d.]+)", allowed)}
        assert set(re.findall(r">=[\d.]+\d", allowed)) - {">=3.13"} | excluded == wanted[name], name
        assert pin == pinned[name], name


def test_the_compatibility_page_has_the_oldest_allowed_trainers():
    found = re.findall(r"^\| (\w+)[^|]* \| ([\d.]+) \| [\d.]+ \|", PAGE, re.MULTILINE)
    assert sorted(f"{name}=={version}" for name, version in found) == sorted(trainers("oldest"))
    assert sorted(name for name, _ in found) == sorted(trainers("newest"))


def test_only_tests_of_integrations_need_the_libraries():
    marked = [each for each in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.frameworks" in each.read_text()]
    marked.remove(Path(__file__))
    assert len(marked) > 4
    assert not [each for each in marked if not any(each.is_relative_to(ROOT / known) for known in FRAMEWORKS)]


def test_the_compatibility_page_has_the_formats_of_this_version():
    found = dict(re.findall(r"^\| (wire protocol|ledger schema|layout) \| (\d+)", PAGE, re.MULTILINE))
    assert found == {"wire protocol": str(PROTOCOL), "ledger schema": str(SCHEMA_VERSION), "layout": str(FORMAT)}
