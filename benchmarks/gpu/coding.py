"""Measures coding on the device of the parameters: `python -m benchmarks.gpu.coding`.

There is no core. The script takes every fragment's pseudo-gradient once and adopts an update of every fragment once, as
one period of H inner steps would. `--code-on host` measures coding in host memory. Run one process per measurement,
because a process's peak memory never falls.

`--ranks N` measures N ranks of one learner, whose model is sharded with `fully_shard`. Each rank has its own GPU. With
`--device cpu`, all ranks share the CPUs and exchange values over gloo. Each figure is that of the worst rank.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from atoll.boundary.local_parameters import LocalParameters
from atoll.device import block_kernels
from atoll.device.device_coder import BLOCKS_PER_CALL, DeviceCoder
from atoll.fragments import segments
from atoll.fragments.adoption import Change, Fate, PreparedAnchor
from atoll.fragments.segments import Coder
from atoll.model.parameters import Parameters
from atoll.ranks.division import divide
from atoll.ranks.entering import gathered_parts
from atoll.ranks.placements import local_tensor
from atoll.ranks.rank_group import ALONE, RankGroup, Vector, rank_group
from atoll_wire.layout.frame_spans import BLOCK, Codec
from atoll_wire.layout.layout import Layout, plan
from torch import nn
from torch.distributed.fsdp import fully_shard

PASSES = 5
INNER_STEP_S = 0.05  # with several ranks, a pause replaces training between the beginning and the end of an adoption
WIDTH = 4096
COPIED = 1 << 26  # values of the vectors whose copies are measured


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure. is_rate: whether more is better."""

    name: str
    value: float
    unit: str
    is_rate: bool = False


class Bench:
    """One rank of a model without a core.

    parameters: approximate number, of all ranks together. fragments: number of fragments. on_host: stage the parameters
    in host memory.
    """

    def __init__(
        self,
        device: torch.device,
        parameters: int,
        fragments: int,
        dtype: torch.dtype,
        *,
        on_host: bool = False,
        ranks: RankGroup = ALONE,
    ) -> None:
        self._device = device
        self._ranks = ranks
        self._coder = DeviceCoder(device) if not on_host and ranks.connect(device) else None
        self._torch: Any = torch.get_device_module(device)
        width = min(WIDTH, int(parameters**0.5))
        layers = max(1, parameters // (width * (width + 1)))
        self._model = nn.Sequential(*(nn.Linear(width, width, device="meta", dtype=dtype) for _ in range(layers)))
        if ranks.size > 1:
            for layer in self._model:
                fully_shard(layer)
            fully_shard(self._model)
        self._model.to_empty(device=device)
        self._values = Parameters(self._model, torch.optim.SGD(self._model.parameters(), 0.1))
        self.layout: Layout = plan(self._values.tensors, fragments)
        parts = gathered_parts(self._values.tensors, self._values.parts, ranks)
        self._divisions = [divide(fragment, parts, ranks.rank) for fragment in self.layout.fragments]

    @property
    def on_device(self) -> bool:
        """Whether the values are coded on the device."""
        return self._coder is not None

    def figures(self) -> list[Figure]:
        """Measures everything. Returns the figures of the worst rank. All ranks call this together."""
        mine = [*self._boundaries(), *self._bandwidths()]
        found = [json.loads(each) for each in self._ranks.gathered(json.dumps([each.value for each in mine]).encode())]
        every = zip(mine, zip(*found, strict=True), strict=True)
        return [replace(each, value=(min if each.is_rate else max)(values)) for each, values in every]

    def _bandwidths(self) -> list[Figure]:
        """Measures copies, and the coding kernel on values that are already on the device."""
        count = min(COPIED, self.layout.parameters) // BLOCK * BLOCK
        pinned = torch.zeros(count, pin_memory=self._device.type != "cpu")
        one, other = (torch.randn(count, device=self._device) for _ in range(2))

        def quantise() -> None:
            for some in one.view(-1, BLOCK).split(BLOCKS_PER_CALL):
                block_kernels.quantise(some, None, 7)

        copied_s, coded_s = self._seconds(partial(other.copy_, one)), self._seconds(quantise)
        there_s = self._seconds(partial(one.copy_, pinned, non_blocking=True))
        back_s = self._seconds(partial(pinned.copy_, one, non_blocking=True))
        found = [
            Figure("copy within the device", 8 * count / copied_s / 1e9, "GB/s, read and written", is_rate=True),
            Figure("int4 quantise and pack on the device", 4 * count / coded_s / 1e9, "GB/s of float32", is_rate=True),
            Figure("copy from pinned memory", 4 * count / there_s / 1e9, "GB/s", is_rate=True),
            Figure("copy to pinned memory", 4 * count / back_s / 1e9, "GB/s", is_rate=True),
        ]
        if self._ranks.size > 1:
            counts = [count // self._ranks.size] * self._ranks.size
            sent, exchange = one[: sum(counts)], self._exchange
            work = partial(exchange, sent, counts) if self.on_device else partial(exchange, sent.cpu().numpy(), counts)
            exchanged_s = self._seconds(work)
            found.append(Figure("exchange with all ranks", 4 * count / exchanged_s / 1e9, "GB/s sent", is_rate=True))
        return found

    def _exchange(self, given: Vector, counts: Sequence[int]) -> None:
        """Sends values to all ranks, and waits for theirs."""
        received = self._ranks.exchange(given, counts, counts)
        received()

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
        runs = [division.run for division in self._divisions]
        first = [PreparedAnchor(n, 1, np.zeros(run.length, np.float32), Fate()) for n, run in enumerate(runs)]
        local = LocalParameters(
            self._values.values,
            self._divisions,
            Codec.INT4,
            first,
            keep=True,
            ranks=self._ranks,
            coder=self._coder,
        )
        times = [self._sync(local, number) for number in range(len(local.tracks))]
        taking_ms, encoding_ms, preparing_ms, adopting_ms = (1e3 * sum(column) for column in zip(*times, strict=True))
        host, device = peak_bytes() - before, self._on_device(peak=True) - on_device
        share = self.layout.parameters / self._ranks.size
        return [
            Figure("blocked in step() to take all fragments", taking_ms, "ms"),
            Figure("blocked in step() to adopt all fragments", adopting_ms, "ms"),
            Figure("worker threads: encode all fragments", encoding_ms, "ms"),
            Figure("worker threads: prepare all adoptions", preparing_ms, "ms"),
            Figure("extra host memory, including anchors", host / share, "B/parameter of the rank"),
            Figure("extra device memory", device / share, "B/parameter of the rank"),
        ]

    def _sync(self, local: LocalParameters, number: int) -> tuple[float, float, float, float]:
        """Returns the seconds to take a fragment's work, encode it, prepare an adoption, and adopt."""
        coder: Coder = self._coder or segments
        old, shape = local.tracks[number].anchor, local.tracks[number].shape
        with torch.no_grad():  # the device is busy with training when the boundary begins
            torch._foreach_mul_([local_tensor(value) for value in self._values.values], 1.001)
        taken, taking_s = timed(lambda: local.take(number, 1, 1))
        q, encoding_s = timed(lambda: taken.coded)
        new = old + segments.change(old, old, q, None, shape)
        values, preparing_s = timed(lambda: coder.change(old, new, q, q, shape))
        newer = PreparedAnchor(number, 2, new, Fate(q), Change(old, q, values))
        _, beginning_s = timed(lambda: local.begin(newer))
        if self._ranks.size > 1:
            time.sleep(INNER_STEP_S)
        _, finishing_s = timed(lambda: local.finish(number, 1, 1))
        self._torch.synchronize()
        return taking_s, encoding_s, preparing_s, beginning_s + finishing_s

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


def main() -> int:
    """Prints the figures. Starts the ranks, unless torchrun started this process. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--code-on", choices=("device", "host"), default="device")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    if given.ranks > 1 and "RANK" not in os.environ:
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
        command = [sys.executable, "-m", *launch, "-m", "benchmarks.gpu.coding", *sys.argv[1:]]
        return subprocess.run(command, check=False).returncode
    if given.ranks > 1:
        if given.device != "cpu":
            given.device = f"{given.device}:{os.environ['LOCAL_RANK']}"
            torch.get_device_module(given.device).set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    measure(given)
    if given.ranks > 1:
        dist.destroy_process_group()
    return 0


def measure(given: argparse.Namespace) -> None:
    """Measures with this process as one rank. Rank 0 prints the figures."""
    segments.warm_up()
    device, dtype, ranks = torch.device(given.device), getattr(torch, given.dtype), rank_group()
    on_host = given.code_on == "host"
    bench = Bench(device, int(given.parameters), given.fragments, dtype, on_host=on_host, ranks=ranks)
    figures = bench.figures()
    if ranks.is_leader:
        place = "device" if bench.on_device else "host"
        print(f"{device}, {ranks.size} ranks, coded on the {place}, {dtype}, torch {torch.__version__}")
        print(f"{bench.layout.parameters / 1e6:.0f}M parameters, {len(bench.layout.fragments)} fragments")
        for figure in figures:
            print(f"{figure.name:46} {figure.value:10.2f} {figure.unit}")
    ranks.leave()


if __name__ == "__main__":
    sys.exit(main())
