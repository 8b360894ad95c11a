"""One rank of the data-parallel side, at its best: buckets that overlap with backward, gradients in 16 bits.

A third of the step's length passes in forward, two thirds in backward, over which buckets leave as they are ready: what
communication can hide behind is all there, and what the processor computes is a part of it.
"""

import argparse
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from atoll_forecast.planning.bandwidth import FORWARD
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks.data_parallel.rank import LossOf
from benchmarks.twentyfold.pace import Job, Pace


def bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Gradients travel as bfloat16, as torch's own hook has it, which is for accelerators only."""
    narrow = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(narrow, group=group, async_op=True).get_future()
    widened: torch.futures.Future[torch.Tensor] = future.then(lambda done: bucket.buffer().copy_(done.value()[0]))
    return widened


HOOKS = {"none": default_hooks.allreduce_hook, "bf16": bf16, "fp16": default_hooks.fp16_compress_hook}


class Backward:
    """Two thirds of a step pass in it, evenly over the gradients: a bucket leaves when an accelerator would have it."""

    def __init__(self, hook: Callable[..., torch.futures.Future[torch.Tensor]], step_s: float, parameters: int) -> None:
        self._hook = hook
        self._each_s = (1 - FORWARD) * step_s / parameters
        self._at = 0.0

    def begin(self) -> None:
        """Backward begins now."""
        self._at = time.monotonic()

    def ready(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """A bucket's gradients are there."""
        self._at += self._each_s * bucket.buffer().numel()
        time.sleep(max(0.0, self._at - time.monotonic()))
        return self._hook(group, bucket)


def main() -> None:
    """Trains so many steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--number", "--ranks", "--steps"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--bucket-mb", type=float, required=True)
    parser.add_argument("--hook", choices=HOOKS, required=True)
    parser.add_argument("--meet", required=True, help="HOST:PORT of rank 0")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    pace = Pace(Job(options.number, options.step_s, options.steps, options.record))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.meet}",
        rank=options.number,
        world_size=options.ranks,
        timeout=timedelta(hours=1),
    )
    whole = nn.parallel.DistributedDataParallel(
        LossOf(pace.model), bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
    )
    backward = Backward(HOOKS[options.hook], options.step_s, sum(p.numel() for p in pace.model.parameters()))
    whole.register_comm_hook(None, backward.ready)
    for step in range(options.steps):
        began, batch = pace.begin(step)
        loss = whole(batch)
        pace.optimizer.zero_grad(set_to_none=True)
        pace.pad(began, FORWARD)
        backward.begin()
        loss.backward()
        nn.utils.clip_grad_norm_(pace.model.parameters(), 1.0)
        pace.optimizer.step()
        pace.end(step, began, loss.item())
    if options.save is not None:
        torch.save(pace.model.state_dict(), options.save)
    dist.barrier()
    # Destroying the group can hang: it holds the GIL and joins a thread that wants it, to free a hook's future.
    os._exit(0)


if __name__ == "__main__":
    main()
