"""Ranks write a run's initial parameters together, although none of them can hold the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.learner.first_file_rank import COLUMNS, LAYERS, ROWS

pytestmark = pytest.mark.ci  # starts two processes

RANKS = 2
TENSOR_BYTES = 4 * ROWS * COLUMNS


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """Returns the folder with the file, and the reports of all ranks."""
    folder = tmp_path_factory.mktemp("first")
    command = [sys.executable, "-m", "tests.learner.first_file_rank"]
    commands = [[*command, str(rank), str(RANKS), str(folder)] for rank in range(RANKS)]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # so that the C library returns freed tensors at once
    running = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True, env=env) for each in commands]
    try:
        said = [each.communicate(timeout=60)[1] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0] * RANKS, "".join(said)[-6000:]
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def test_the_file_has_the_values_of_all_ranks(written):
    with safe_open(written[0] / "first.safetensors", "pt") as file:
        assert {*file.keys()} == {f"{number}.weight" for number in range(LAYERS)}
        for number in range(LAYERS):
            rows = number + torch.arange(ROWS).float()
            assert torch.equal(file.get_tensor(f"{number}.weight"), rows[:, None].expand(-1, COLUMNS))


def test_no_rank_holds_more_than_a_few_tensors(written):
    for report in written[1]:
        assert report["grown"] < LAYERS / 2 * TENSOR_BYTES


def test_a_disk_that_fails_on_rank_0_leaves_the_other_ranks_in_step(written):
    assert ["No such file or directory" in report["error"] for report in written[1]] == [True, False]
