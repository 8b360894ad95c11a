"""Measures training with a Learner vs. without one: `python -m benchmarks.gpu.training`.

One process trains a transformer with AdamW, first alone, then with a Learner and a core on the same machine, then alone
again. It reports the time inside `step()`, the speed with and without the learner, and the memory. On a GPU, the
matrix products use bfloat16. The first two periods with the learner warm up, and are not measured. Example:
python -m benchmarks.gpu.training --size 1b --device cuda --json PATH
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import atoll
import torch
from atoll.demo.processes import children
from atoll.reference.model import ModelSize, Transformer
from atoll_wire.process.logs import configure

from benchmarks.conditions import conditions, write_record
from benchmarks.data_plane.sync_learner import ALL_SIZES
from benchmarks.gpu.coding import peak_bytes

LARGE = ALL_SIZES | {"1b": ModelSize(width=2048, layers=20, heads=16, context=1024)}
FRAGMENTS, RATE = 24, 1e-4


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase. step_s: seconds per inner step, `step()` included. device_bytes: peak of torch's memory on the GPU."""

    step_s: float
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures. blocked: share of time inside `step()`. in_step_s: seconds of each call of `step()`, in order.

    joining_s: from `start` until the first step, with the upload of the initial parameters.
    host_bytes: peak resident memory of the training process.
    """

    device: str
    torch_version: str
    parameters: int
    tokens_per_step: int
    inner_steps: int
    before: Phase
    learner: Phase
    after: Phase
    in_step_s: list[float]
    blocked: float
    joining_s: float
    merged: int
    adopted: int
    host_bytes: int

    @property
    def slower(self) -> float:
        """How much longer a step takes with the learner than without, as a ratio."""
        return self.learner.step_s / statistics.fmean([self.before.step_s, self.after.step_s])


class Trainer:
    """A model, its optimizer, and random text."""

    def __init__(self, size: ModelSize, device: torch.device, batch: int) -> None:
        torch.manual_seed(0)
        self._device = device
        self._module: Any = torch.get_device_module(device)
        with torch.device(device):
            self.model = Transformer(size)
            self._text = torch.randint(0, 256, (64, batch, size.context + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), RATE, fused=True)
        self.tokens = batch * size.context
        self._count = 0

    def step(self) -> None:
        """Queues one inner step."""
        self._count += 1
        window = self._text[self._count % len(self._text)]
        narrow = torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type != "cpu")
        with narrow:
            loss = self.model.loss(window)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def phase(self, steps: int, between: Callable[[], None]) -> Phase:
        """Measures inner steps. between: called after each."""
        on_gpu = self._device.type != "cpu"
        if on_gpu:
            self._module.reset_peak_memory_stats()
        self._module.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
            between()
        self._module.synchronize()
        wall_s = time.perf_counter() - began
        print(f"{steps} steps, {1e3 * wall_s / steps:.1f} ms each", file=sys.stderr, flush=True)
        return Phase(wall_s / steps, int(self._module.max_memory_allocated()) if on_gpu else 0)


def measure(size: str, device: torch.device, batch: int, inner_steps: int, periods: int) -> Figures:
    """Measures all phases. periods: number of measured periods of H inner steps, in each phase."""
    trainer, steps = Trainer(LARGE[size], device, batch), periods * inner_steps
    trainer.phase(8, _nothing)
    before = trainer.phase(steps, _nothing)
    times = list[float]()
    with tempfile.TemporaryDirectory() as place, children(Path(place)) as group:
        options = ["--fragments", str(FRAGMENTS), "--inner-steps", str(inner_steps), "--snapshot-every-s", "3600"]
        _, address = group.start_core(Path(place) / "run", "127.0.0.1:0", options)
        with atoll.Learner(trainer.model, trainer.optimizer, address, "gpu", connect_timeout_s=120) as learner:

            def between() -> None:
                began = time.perf_counter()
                learner.step(tokens=trainer.tokens)
                times.append(time.perf_counter() - began)

            trainer.phase(2 * inner_steps, between)
            old = learner.stats()
            times.clear()
            with_learner = trainer.phase(steps, between)
            new = learner.stats()
    after = trainer.phase(steps, _nothing)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Figures(
        device=name,
        torch_version=torch.__version__,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        tokens_per_step=trainer.tokens,
        inner_steps=inner_steps,
        before=before,
        learner=with_learner,
        after=after,
        in_step_s=times,
        blocked=sum(times) / (with_learner.step_s * steps),
        joining_s=new.joining_s,
        merged=new.merged - old.merged,
        adopted=sum(new.versions) - sum(old.versions),
        host_bytes=peak_bytes(),
    )


def _nothing() -> None:
    """Takes the place of a learner's step."""


def main() -> int:
    """Prints the figures. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=LARGE, default="1b")
    parser.add_argument("--batch", type=int, default=8, help="sequences per inner step")
    parser.add_argument("--inner-steps", type=int, default=48)
    parser.add_argument("--periods", type=int, default=3, help="measured periods of H inner steps, in each phase")
    parser.add_argument("--json", type=Path, dest="json_path")
    given, under = parser.parse_args(), conditions()
    configure("warning", json=False)
    torch.set_float32_matmul_precision("high")
    found = measure(given.size, torch.device(given.device), given.batch, given.inner_steps, given.periods)
    longest = sorted(found.in_step_s)
    rows = [
        ("inner step without a learner, before and after", found.before.step_s, found.after.step_s, "s"),
        ("inner step with the learner", found.learner.step_s, found.slower, "s; ratio"),
        ("share of time inside step()", found.blocked, max(longest), "; longest call, s"),
        ("call of step(): median, 99th percentile", longest[len(longest) // 2], longest[len(longest) * 99 // 100], "s"),
        ("contributions merged, updates adopted", found.merged, found.adopted, ""),
        ("joining, including the first parameters", found.joining_s, 0.0, "s"),
        ("device memory: without, with", found.before.device_bytes / 1e9, found.learner.device_bytes / 1e9, "GB"),
        ("host memory, peak", found.host_bytes / 1e9, 0.0, "GB"),
    ]
    print(f"{found.device}, {found.parameters / 1e6:.0f}M parameters, {FRAGMENTS} fragments, H = {found.inner_steps}")
    for name, one, other, unit in rows:
        print(f"{name:50} {one:12.6f} {other:12.6f} {unit}")
    if given.json_path is not None:
        write_record(given.json_path, asdict(found), under)
    return 0


if __name__ == "__main__":
    sys.exit(main())
