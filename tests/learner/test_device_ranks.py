"""Ranks that code and exchange values on a device get the same bits as ranks in host memory.

The ranks are processes that exchange values over gloo. CPU tensors stand for the device's tensors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.learner.device_rank import STEPS

FAST, TWO, FOUR = ("fsdp/bf16", "tp"), ("fsdp", "ddp"), ("fsdp", "hsdp", "fsdp+tp", "ddp", "tp", "fsdp+tp/bf16")


def lived(kinds: tuple[str, ...], size: int, folder: Path) -> list[dict[str, Any]]:
    """Runs all ranks. Returns their reports."""
    command = [sys.executable, "-m", "tests.learner.device_rank", ",".join(kinds)]
    commands = [[*command, str(rank), str(size), str(folder)] for rank in range(size)]
    running = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        said = [each.communicate(timeout=350)[1] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0] * size, "".join(said)[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kinds", "size"),
    [
        pytest.param(FAST, 2, marks=pytest.mark.ci),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((TWO, 2), (FOUR, 4))),
    ],
)
def test_ranks_on_a_device_have_the_bits_of_ranks_in_host_memory(kinds, size, tmp_path):
    reports = lived(kinds, size, tmp_path)
    for rank, report in enumerate(reports):
        for kind in kinds:
            assert report[kind]["device"] == report[kind]["host"], (kind, rank)
            assert len(set(report[kind]["host"])) == STEPS
        ranks = [float(number) for number in range(size)]
        assert report["connections"] == {
            "cuda:gloo": [False, False, False, ranks],  # like a group with only NCCL, which has no backend for the CPU
            "gloo": [True, False, False, ranks],
        }
