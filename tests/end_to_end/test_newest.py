"""A core with the newest gRPC and protobuf serves learners with those of constraints.txt."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.end_to_end.world import core, eventually, train

PACKAGES = ["grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf"]


@pytest.mark.slow
def test_a_core_with_the_newest_grpc_serves_learners_with_ours(tmp_path, monkeypatch):
    newest = tmp_path / "newest"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(newest), *PACKAGES]
    subprocess.run(pip, check=True, timeout=600)
    monkeypatch.setenv("PYTHONPATH", str(newest))
    with core(tmp_path) as running:
        monkeypatch.delenv("PYTHONPATH")
        train(running.address, "a", "b", steps=80)
        eventually(lambda: running.status().contributions.pending == 0)
        assert running.status().contributions.merged > 5
