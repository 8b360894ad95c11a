"""What `make test-newest` and `make test-oldest` install is what pyproject.toml says."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement

from tests.versions import floor, needed, pythons, torches


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_each_requirement_has_one_floor_that_can_be_installed(version):
    floors = dict(floor(each).split("==") for each in needed(version))
    assert {"grpcio", "protobuf", "numba", "numpy", "psutil", "fastapi"} <= set(floors)
    assert not {"atoll", "torch"} & set(floors)
    assert floors["numpy"] == ("2.1" if version == "3.13" else "1.26")


def test_a_requirement_without_a_floor_is_an_error():
    with pytest.raises(ValueError, match="not enough values"):
        floor(Requirement("grpcio<2"))


def test_torch_is_tried_as_a_cpu_build_from_the_floor_on():
    oldest, pinned = torches("oldest")
    assert oldest == "torch==2.6.0+cpu", "the first with torch.distributed.fsdp.fully_shard"
    assert pinned == next(torches("newest")) != oldest


def test_the_python_that_runs_this_is_found():
    assert any(version in {"3.11", "3.12", "3.13", "3.14"} for version, _ in pythons())
