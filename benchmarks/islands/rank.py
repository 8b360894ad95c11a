"""One rank of a learner that trains a stack of linear layers, sharded with `fully_shard`.

python -m benchmarks.islands.rank FOLDER LAYERS WIDTH STEPS PACE_S [ADDRESS [checkpoint]]

The model is built on the meta device, so that no rank ever holds all of it. Without ADDRESS, the same loop trains
without a Learner. PACE_S: a pause in each step, in place of computation. checkpoint: save one at the middle step.
Writes FOLDER/rank-N.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import atoll
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CALLS_IN_A_ROW = 3000


class WithoutLearner:
    """Takes the place of a Learner."""

    def step(self, tokens: int) -> None:
        """Does nothing."""


def timed(learner: atoll.Learner | WithoutLearner) -> float:
    """Calls `step`, and returns its seconds."""
    entered = time.perf_counter()
    learner.step(tokens=1)
    return time.perf_counter() - entered


def sharded(layers: int, width: int) -> nn.Sequential:
    """Returns the model with random parameters, sharded over all ranks if there are several."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if dist.is_initialized():
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        nn.init.normal_(held, std=width**-0.5)
    return model


def peak_bytes() -> int:
    """Returns the peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Trains, and writes this rank's figures. step_s: after each training step; row_s: calls in a row afterwards."""
    folder, layers, width, steps, pace_s, *address = sys.argv[1:]
    saves = len(address) > 1
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = sharded(int(layers), int(width))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)
    times = list[float]()
    with contextlib.ExitStack() as stack:
        learner: Any = WithoutLearner()
        if address:
            joined = atoll.Learner(
                model,
                optimizer,
                address[0],
                "island",
                connect_timeout_s=120,
                drain_s=60,
                checkpoint_dir=Path(folder) / "checkpoints" if saves else None,
            )
            learner = stack.enter_context(joined)
        joined_bytes, began = peak_bytes(), time.perf_counter()
        for number in range(int(steps)):
            if saves and number == int(steps) // 2:
                learner.save_checkpoint()
            model(torch.randn(1, int(width))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if float(pace_s):
                time.sleep(float(pace_s))
            times.append(timed(learner))
        wall_s = time.perf_counter() - began
        row = [timed(learner) for _ in range(CALLS_IN_A_ROW)]
        merged = learner.stats().merged if address else 0
    figures = {
        "joined_bytes": joined_bytes,
        "peak_bytes": peak_bytes(),
        "step_s": times,
        "row_s": row,
        "wall_s": wall_s,
        "merged": merged,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "largest_tensor": max(parameter.numel() for parameter in model.parameters()),
    }
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
