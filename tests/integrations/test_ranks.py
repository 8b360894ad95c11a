"""Jobs of two ranks under torchrun are one learner, which counts both ranks' tokens."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.end_to_end.world import core, eventually
from tests.integrations.rank import BATCH, STEPS
from tests.integrations.world import REAL_TOKENS, learner_status

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]


@pytest.mark.parametrize("sharded", ["", "_fsdp2"])
@pytest.mark.parametrize("trainer", ["transformers", "lightning", "accelerate"])
def test_two_ranks_are_one_learner(tmp_path, trainer, sharded):
    with core(tmp_path) as running:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = ["-m", "tests.integrations.rank", trainer + sharded, running.address, str(tmp_path / "out")]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launch, *script], capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        counted = done.stdout.split("counted ")[1].split()[:4]
        assert counted == [str(STEPS), str(STEPS * 2 * 2 * BATCH * REAL_TOKENS), "0", "0.0"]
        assert learner_status(running).state == "left"
        eventually(lambda: running.status().contributions.merged >= 2)
