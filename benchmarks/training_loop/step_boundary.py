"""Measures `Learner.step()` when a round is due: python -m benchmarks.training_loop.step_boundary [--steps 10000].

A learner of 124M parameters runs forward and backward passes, and a round is due about every step. A step counts if it
takes a contribution or adopts an update. Its kernels are the calls that read, code and change the parameters, with
their CPU time, which excludes waits for the GIL. The rest of step() is what training loses beyond these kernels. The
run is repeated with a shorter switch interval of the GIL, since a thread that needs the GIL may wait for one interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from atoll.boundary.host_values import HostValues
from atoll.boundary.local_parameters import LocalParameters
from atoll.demo.processes import children
from atoll.learner import Learner
from atoll.reference.model import SIZES, Transformer
from atoll_wire.process.logs import configure

from benchmarks.conditions import conditions, write_record

SIZE, CONTEXT = "124m", 8  # a short context, so that a step takes less than a second
FRAGMENTS = INNER_STEPS = 24
OVERLAP = 12  # rounds in flight
INTERVALS_S = (0.005, 0.0005)  # the default, and a shorter one
PERCENTILES = (50.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Percentiles over all counted steps, in milliseconds. beyond_ms: step() less its kernels.

    interval_s: the switch interval of the GIL. steps: number of counted steps. pass_s: median time of a forward and
    backward pass. merged: number of the learner's contributions that were merged.
    """

    interval_s: float
    steps: int
    pass_s: float
    merged: int
    step_ms: list[float]
    kernels_ms: list[float]
    beyond_ms: list[float]


class Kernels:
    """The CPU seconds of one thread in the wrapped methods. calls: number of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the method with its time counted."""

        def call(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as the method
            began = time.thread_time()
            try:
                return method(*given, **named)
            finally:
                self.seconds += time.thread_time() - began
                self.calls += 1

        return call


def measure(steps: int, interval_s: float) -> Boundaries:
    """Runs a core and a learner."""
    with tempfile.TemporaryDirectory() as directory, children(Path(directory)) as group:
        options = ["--fragments", f"{FRAGMENTS}", "--inner-steps", f"{INNER_STEPS}", "--overlap", f"{OVERLAP}"]
        core, address = group.start_core(Path(directory) / "run", "127.0.0.1:0", options)
        words = [sys.executable, "-m", "benchmarks.training_loop.step_boundary", "--steps", f"{steps}"]
        words += ["--learner", address, "--interval-s", f"{interval_s}"]
        told = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        group.stop(core)
    return Boundaries(**json.loads(told.stdout.splitlines()[-1]))


def learn(address: str, steps: int, interval_s: float) -> Boundaries:
    """Runs the learner until `steps` steps count."""
    configure("warning", json=False)
    sys.setswitchinterval(interval_s)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = Kernels()
    LocalParameters.take = kernels.timed(LocalParameters.take)  # type: ignore[method-assign]
    HostValues.write = kernels.timed(HostValues.write)  # type: ignore[method-assign]
    model = Transformer(SIZES[SIZE])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    window = torch.randint(0, 256, (1, CONTEXT + 1))
    counted, passes = list[tuple[float, float]](), list[float]()
    with Learner(model, optimizer, server=address, name="a", drain_s=0.0) as learner:
        while len(counted) < steps:
            began = time.perf_counter()
            logits = model(window[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).backward()
            passes.append(time.perf_counter() - began)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            kernels.seconds, kernels.calls = 0.0, 0
            began = time.perf_counter()
            learner.step(tokens=CONTEXT)
            took_s = time.perf_counter() - began
            if kernels.calls:
                counted.append((took_s, kernels.seconds))
        merged = learner.stats().merged
    took_ms, own_ms = 1e3 * np.array(counted).T
    percentiles = (
        [float(each) for each in np.percentile(some, PERCENTILES)] for some in (took_ms, own_ms, took_ms - own_ms)
    )
    return Boundaries(interval_s, len(counted), float(np.median(passes)), merged, *percentiles)


def main() -> None:
    """Measures, prints the percentiles, and writes them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="number of steps that count, per switch interval")
    parser.add_argument("--json", type=Path, dest="json_path")
    parser.add_argument("--learner", help=argparse.SUPPRESS)
    parser.add_argument("--interval-s", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.learner:
        print(json.dumps(asdict(learn(arguments.learner, arguments.steps, arguments.interval_s))))
        return
    under = conditions()
    found = [measure(arguments.steps, interval_s) for interval_s in INTERVALS_S]
    for each in found:
        print(f"switch interval {1e3 * each.interval_s:g} ms, {each.steps} steps, {each.merged} merged", end="; ")
        for name, values in (("step()", each.step_ms), ("kernels", each.kernels_ms), ("beyond them", each.beyond_ms)):
            print(
                f"{name}: " + ", ".join(f"p{at:g} {value:.1f}" for at, value in zip(PERCENTILES, values, strict=True)),
                end=" ms; ",
            )
        print()
    if arguments.json_path is not None:
        write_record(arguments.json_path, {"boundaries": list(map(asdict, found))}, under)


if __name__ == "__main__":
    main()
