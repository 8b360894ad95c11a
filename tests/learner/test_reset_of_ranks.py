"""Ranks whose parameters a program overwrote have the run's values in the next forward pass, even if unsharded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.end_to_end.sharded_rank import WRITTEN
from tests.learner.fake_core import fake_core

RANKS = 2
FAR = 100.0  # less than the reset changes the outputs
CLOSE = 0.05  # a few roundings of an output to bfloat16


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_reset_reaches_the_next_forward_pass_of_an_unsharded_module(tmp_path):
    """No round opens, so no adoption reshards the module."""
    (tmp_path / "go").touch()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with fake_core() as core:
        command = [*launch, "-m", "tests.end_to_end.sharded_rank", core.address, str(tmp_path), "overwrite"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)
        assert max(found["moved"][:WRITTEN]) == 0, "no other change happens between two forward passes"
        assert found["abandoned"] > 0, "the learner must find the overwritten values"
        reset = next(number for number, moved in enumerate(found["moved"]) if moved)
        assert found["moved"][reset] > FAR
        assert max(found["stale"][reset:]) < CLOSE
