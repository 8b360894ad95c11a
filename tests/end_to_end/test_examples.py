"""The examples run as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.world import core

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_example_of_fsdp2_trains_on_two_ranks(tmp_path):
    with core(tmp_path, "--inner-steps", "8") as running:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        options = ["--server", running.address, "--name", "eu-west", "--steps", "60"]
        options += ["--checkpoints", str(tmp_path / "checkpoints")]
        command = [*launch, str(EXAMPLES / "fsdp2/train.py"), *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr[-4000:]
        (learner,) = running.status().learners
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert learner.tokens == 60 * 2 * 8 * 64
    assert any(int(version) > 0 for version in re.findall(r"\d+", done.stdout.splitlines()[-1].split("versions")[1]))


def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", str(EXAMPLES / "fsdp2/slurm.sh")], check=True)
