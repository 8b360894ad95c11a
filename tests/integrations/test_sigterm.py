"""SIGTERM in the middle of training with a real trainer: the learner leaves the run, and the process ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.end_to_end.world import core
from tests.integrations.world import learner_status

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]


@pytest.mark.parametrize(("trainer", "status"), [("transformers", -signal.SIGTERM), ("lightning", 0)])
def test_sigterm_ends_training_and_the_learner_leaves(tmp_path, trainer, status):
    with core(tmp_path) as running:
        command = [sys.executable, "-m", "tests.integrations.endless", trainer, running.address, str(tmp_path / "out")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert any(line.startswith("step") for line in child.stdout), child.stderr.read()[-3000:]
            child.send_signal(signal.SIGTERM)
            out, errors = child.communicate(timeout=60)
        finally:
            child.kill()
        assert "ended" not in out, "training must not return as if it had finished"
        assert child.returncode == status, errors[-3000:]
        assert learner_status(running).state == "left"
