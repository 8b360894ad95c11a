"""The benchmark of coding on a device runs on CPU tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.gpu.coding import Bench


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_host", [False, True])
def test_every_figure_is_measured(dtype, on_host):
    found = Bench(torch.device("cpu"), 200_000, 3, dtype, on_host=on_host).figures()
    assert len({figure.name for figure in found}) == 10
    times = [figure.value for figure in found if figure.unit.startswith(("ms", "GB/s"))]
    assert len(times) == 8
    assert min(times) > 0


@pytest.mark.ci
def test_two_ranks_are_measured_on_the_cpu():
    options = ["--ranks", "2", "--device", "cpu", "--parameters", "2e5", "--fragments", "3"]
    command = [sys.executable, "-m", "benchmarks.gpu.coding", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks, coded on the device" in done.stdout
    assert "exchange with all ranks" in done.stdout
