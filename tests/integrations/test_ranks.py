"""Jobs of two ranks under torchrun are one learner, which counts both ranks' tokens."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from tests.end_to_end.world import core, eventually
from tests.integrations.rank import BATCH, SAVE_EVERY, STEPS
from tests.integrations.world import REAL_TOKENS, learner_status

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]


# On CPUs, transformers 4 refuses FSDP2, and cannot load the optimizer's state into several ranks: also without Atoll.
OLD = any(each.version.startswith("4.") for each in importlib.metadata.distributions(name="transformers"))
SHARDED = [("lightning", "_fsdp2"), ("accelerate", "_fsdp2"), *([] if OLD else [("transformers", "_fsdp2")])]
RESUMED = ["lightning", *([] if OLD else ["transformers"])]
TOKENS = 2 * 2 * BATCH * REAL_TOKENS  # of a step: two ranks with two micro-batches each


def trained(running, trainer, folder, **environment):
    """Runs a job of two ranks to its end."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["-m", "tests.integrations.rank", trainer, running.address, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([*launch, *script], capture_output=True, text=True, timeout=300, env=environment)


def _said(job: subprocess.CompletedProcess[str]) -> str:
    """Returns the standard error of a job up to its launcher's own report, which is long and says little."""
    return job.stderr.split("torch/distributed/elastic")[0]


@pytest.mark.parametrize(
    ("trainer", "sharded"), [("transformers", ""), ("lightning", ""), ("accelerate", ""), *SHARDED]
)
def test_two_ranks_are_one_learner(tmp_path, trainer, sharded):
    with core(tmp_path) as running:
        done = trained(running, trainer + sharded, tmp_path / "out")
        assert done.returncode == 0, _said(done)
        counted = done.stdout.split("counted ")[1].split()[:4]
        assert counted == [str(STEPS), str(STEPS * TOKENS), "0", "0.0"]
        assert learner_status(running).state == "left"
        eventually(lambda: running.status().contributions.merged >= 2)


@pytest.mark.parametrize("trainer", RESUMED)
def test_a_job_whose_rank_was_killed_resumes_from_its_trainers_checkpoint(tmp_path, trainer):
    with core(tmp_path) as running:
        died = trained(running, trainer, tmp_path / "out", KILL_AT="5")
        assert died.returncode != 0
        assert "counted" not in died.stdout
        done = trained(running, trainer, tmp_path / "out")
        assert done.returncode == 0, _said(done)
        steps, tokens, pending, abandoned, earlier_steps, earlier_tokens = (
            int(float(each)) for each in done.stdout.split("counted ")[1].split()
        )
        assert steps == STEPS - SAVE_EVERY, "training must continue after the checkpoint"
        assert (tokens, pending, abandoned) == (steps * TOKENS, 0, 0)
        assert 0 < earlier_steps <= 5, "the core must know the steps of the killed job"
        assert earlier_tokens == earlier_steps * TOKENS
        assert running.status().tokens_trained == tokens + earlier_tokens, "each token must count once"
        assert learner_status(running).state == "left"
