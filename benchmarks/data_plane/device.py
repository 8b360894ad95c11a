"""Measures coding on the device of the parameters: `python -m benchmarks.data_plane.device`.

There is no core. The script takes every fragment's pseudo-gradient once and adopts an update of every fragment once, as
one period of H inner steps would. `--code-on host` measures the staging in host memory instead. Compare two processes,
because a process's peak memory never falls.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from atoll.boundary.local_parameters import LocalParameters
from atoll.boundary.parameters import Parameters
from atoll.device import block_kernels
from atoll.device.device_coder import AT_ONCE, DeviceCoder
from atoll.fragments import segments
from atoll.fragments.adoption import Change, Fate, PreparedAnchor
from atoll.fragments.segments import Coder
from atoll.ranks.division import undivided
from atoll_wire.layout.frame_spans import BLOCK, Codec
from atoll_wire.layout.layout import Layout, plan
from torch import nn

PASSES = 5
WIDTH = 4096
COPIED = 1 << 26  # values of the vectors whose copies are measured


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure."""

    name: str
    value: float
    unit: str


class Bench:
    """A model without a core.

    parameters: approximate number. fragments: number of fragments. on_host: stage the parameters in host memory.
    """

    def __init__(
        self, device: torch.device, parameters: int, fragments: int, dtype: torch.dtype, *, on_host: bool = False
    ) -> None:
        self._device = device
        self._coder = None if on_host else DeviceCoder(device)
        self._torch: Any = torch.get_device_module(device)
        width = min(WIDTH, int(parameters**0.5))
        layers = max(1, parameters // (width * (width + 1)))
        self._model = nn.Sequential(*(nn.Linear(width, width, device=device, dtype=dtype) for _ in range(layers)))
        self._values = Parameters(self._model, torch.optim.SGD(self._model.parameters(), 0.1))
        self.layout: Layout = plan(self._values.tensors, fragments)

    def figures(self) -> list[Figure]:
        """Measures everything."""
        return [*self._boundaries(), *self._bandwidths()]

    def _bandwidths(self) -> list[Figure]:
        """Measures copies, and the coding kernel on values that are on the device already."""
        count = min(COPIED, self.layout.parameters) // BLOCK * BLOCK
        pinned = torch.zeros(count, pin_memory=self._device.type != "cpu")
        one, other = (torch.randn(count, device=self._device) for _ in range(2))
        lengths = torch.full((AT_ONCE,), BLOCK, device=self._device)

        def quantise() -> None:
            for some in one.view(-1, BLOCK).split(AT_ONCE):
                block_kernels.quantise(some, lengths[: len(some)], 7)

        copied_s, coded_s = self._seconds(partial(other.copy_, one)), self._seconds(quantise)
        there_s = self._seconds(partial(one.copy_, pinned, non_blocking=True))
        back_s = self._seconds(partial(pinned.copy_, one, non_blocking=True))
        return [
            Figure("copy within the device", 8 * count / copied_s / 1e9, "GB/s, read and written"),
            Figure("int4 quantise and pack on the device", 4 * count / coded_s / 1e9, "GB/s of float32"),
            Figure("copy from pinned memory", 4 * count / there_s / 1e9, "GB/s"),
            Figure("copy to pinned memory", 4 * count / back_s / 1e9, "GB/s"),
        ]

    def _seconds(self, work: Callable[[], object]) -> float:
        """Returns the median seconds until the device has done the work."""
        times = []
        for _ in range(PASSES + 1):
            self._torch.synchronize()
            began = time.perf_counter()
            work()
            self._torch.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def _boundaries(self) -> list[Figure]:
        """Takes and adopts every fragment. The training thread's time excludes the work of worker threads."""
        before, on_device = psutil.Process().memory_info().rss, self._on_device()
        first = [PreparedAnchor(f.index, 1, np.zeros(f.length, np.float32), Fate()) for f in self.layout.fragments]
        values, divisions = self._values.values, undivided(self.layout)
        local = LocalParameters(values, divisions, Codec.INT4, first, keep=True, coder=self._coder)
        times = [self._sync(local, number) for number in range(len(local.tracks))]
        taking_ms, encoding_ms, preparing_ms, adopting_ms = (1e3 * sum(column) for column in zip(*times, strict=True))
        host, device = peak_bytes() - before, self._on_device(peak=True) - on_device
        return [
            Figure("blocked in step() to take all fragments", taking_ms, "ms"),
            Figure("blocked in step() to adopt all fragments", adopting_ms, "ms"),
            Figure("worker threads: encode all fragments", encoding_ms, "ms"),
            Figure("worker threads: prepare all adoptions", preparing_ms, "ms"),
            Figure("more host memory, anchors included", host / self.layout.parameters, "B/parameter"),
            Figure("more device memory", device / self.layout.parameters, "B/parameter"),
        ]

    def _sync(self, local: LocalParameters, number: int) -> tuple[float, float, float, float]:
        """Returns the seconds to take a fragment's work, encode it, prepare an adoption, and adopt."""
        coder: Coder = self._coder or segments
        old, shape = local.tracks[number].anchor, local.tracks[number].shape
        with torch.no_grad():  # the device is busy with training when the boundary begins
            torch._foreach_mul_([value.data for value in self._values.values], 1.001)
        taken, taking_s = timed(lambda: local.take(number, 1, 1))
        q, encoding_s = timed(lambda: taken.coded)
        new = old + segments.change(old, old, q, None, shape)
        values, preparing_s = timed(lambda: coder.change(old, new, q, q, shape))
        newer = PreparedAnchor(number, 2, new, Fate(q), Change(old, q, values))
        _, adopting_s = timed(lambda: local.adopt(newer, 1, 1))
        self._torch.synchronize()
        return taking_s, encoding_s, preparing_s, adopting_s

    def _on_device(self, *, peak: bool = False) -> int:
        """Returns the bytes that torch has allocated on the device; 0 on the CPU."""
        if self._device.type == "cpu":
            return 0
        if not peak:
            self._torch.reset_peak_memory_stats()
        return int(self._torch.max_memory_allocated() if peak else self._torch.memory_allocated())


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of a call, and its seconds."""
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def peak_bytes() -> int:
    """Returns the largest size of this process's memory so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--code-on", choices=("device", "host"), default="device")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args()
    segments.warm_up()
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    bench = Bench(device, int(given.parameters), given.fragments, dtype, on_host=given.code_on == "host")
    print(f"{device}, coded on the {given.code_on}, {dtype}, torch {torch.__version__}")
    print(f"{bench.layout.parameters / 1e6:.0f}M parameters, {len(bench.layout.fragments)} fragments")
    for figure in bench.figures():
        print(f"{figure.name:46} {figure.value:10.2f} {figure.unit}")


if __name__ == "__main__":
    main()
