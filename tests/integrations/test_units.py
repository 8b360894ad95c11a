"""Leased units in real trainers: several learners train on each unit of each epoch once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.end_to_end.world import core, eventually
from tests.integrations.unit_learner import EPOCHS, ROWS, UNIT

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400)]
STEPS = 10_000


def started(trainer, running, name, folder, *others, steps=STEPS):
    command = [sys.executable, "-m", "tests.integrations.unit_learner", trainer]
    arguments = [running.address, name, str(steps), str(folder), *others]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def trained(process):
    """Waits for the end of a learner. Returns the rows of its batches."""
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.split("trained ")[1])


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
def test_each_unit_is_trained_on_once_by_several_learners_although_one_stops_early(tmp_path, trainer):
    with core(tmp_path, "--fragments", "2", "--inner-steps", "4") as running:
        early = trained(started(trainer, running, "early", tmp_path, steps=7))
        assert len(early) == 7
        pair = [started(trainer, running, *names) for names in (("a", tmp_path, "b"), ("b", tmp_path, "a"))]
        found = [trained(each) for each in pair]
        assert all(len(batches) > 10 for batches in found), "both learners must train"
        count = Counter(row for batches in (early, *found) for batch in batches for row in batch)
        # A trainer that stops has fetched one more batch, whose unit must return.
        assert count == dict.fromkeys(range(ROWS), EPOCHS)
        eventually(lambda: running.status().datasets[0].consumed == EPOCHS * ROWS // UNIT)
        (dataset,) = running.status().datasets
        assert (dataset.leased, dataset.returned, dataset.epoch) == (0, 0, EPOCHS)
        late = trained(started(trainer, running, "late", tmp_path))
        assert late == [], "all units are consumed"
