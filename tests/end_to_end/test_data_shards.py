"""A run with several shards consumes each unit once, although learners, a shard and the registrar are killed."""

from __future__ import annotations

import random
import threading

import pytest

from benchmarks.failures.data_units import SILENCE
from tests.end_to_end.test_data_units import NAMES, account, follow_up, job_of
from tests.end_to_end.world import eventually, sharded


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_each_unit_is_consumed_once_by_all_shards_together(tmp_path):
    rng, pause = random.Random(1), threading.Event()
    with sharded(tmp_path, 2, "--inner-steps", "8", *SILENCE) as running:
        job = job_of(running.registrar, tmp_path, list(running.shards.values()))
        for name in NAMES:
            job.start(name)
        eventually(lambda: bool(running.status().datasets), 60.0)
        for target in ("a", "registrar", "b", "shard", "c"):
            pause.wait(rng.uniform(0.3, 1.2))
            if target in NAMES:
                job.kill(target)
            else:
                killed = running.registrar if target == "registrar" else running.shards[1]
                killed.kill()
                killed.start()
                follow_up(job)
        account(job)
    assert len(job.kills) >= 2, "the learners ended before enough kills"
