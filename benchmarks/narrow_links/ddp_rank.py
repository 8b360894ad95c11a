"""One rank of the data-parallel side, with its best options: overlapping buckets, and gradients with 16 bits.

The forward pass takes a third of the step's length, and the backward pass two thirds. Buckets are sent during the
backward pass, as soon as they are ready. The CPU's computation is a part of the step's length.
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
from benchmarks.narrow_links.pace import Job, Pace


def bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Sends gradients as bfloat16, like torch's own hook, which works only on accelerators."""
    narrow = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(narrow, group=group, async_op=True).get_future()
    widened: torch.futures.Future[torch.Tensor] = future.then(lambda done: bucket.buffer().copy_(done.value()[0]))
    return widened


HOOKS = {"none": default_hooks.allreduce_hook, "bf16": bf16, "fp16": default_hooks.fp16_compress_hook}


class Backward:
    """Paces the backward pass to two thirds of a step. Delays each bucket until an accelerator would have it ready."""

    def __init__(self, hook: Callable[..., torch.futures.Future[torch.Tensor]], step_s: float, parameters: int) -> None:
        self._hook = hook
        self._each_s = (1 - FORWARD) * step_s / parameters
        self._at = 0.0

    def begin(self) -> None:
        """Records the beginning of a backward pass."""
        self._at = time.monotonic()

    def ready(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Waits until a bucket's time, then all-reduces it. This is DDP's communication hook."""
        self._at += self._each_s * bucket.buffer().numel()
        time.sleep(max(0.0, self._at - time.monotonic()))
        return self._hook(group, bucket)


def main() -> None:
    """Trains one rank with the command line's options."""
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
    # Destroying the group can hang: the call holds the GIL while it joins a thread, and that thread needs the GIL for a
    # future.
    os._exit(0)


if __name__ == "__main__":
    main()
