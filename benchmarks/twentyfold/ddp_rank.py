"""One rank of the data-parallel side, at its best: buckets that overlap with backward, gradients in 16 bits.

The step's length passes before backward, whose communication then begins: as with an accelerator, but for two thirds
of a step that an accelerator could hide at most.
"""

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks.ddp_rank import LossOf
from benchmarks.twentyfold.pace import Job, Pace


def bf16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Gradients travel as bfloat16, as torch's own hook has it, which is for accelerators only."""
    narrow = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(narrow, group=group, async_op=True).get_future()
    widened: torch.futures.Future[torch.Tensor] = future.then(lambda done: bucket.buffer().copy_(done.value()[0]))
    return widened


HOOKS = {"none": None, "bf16": bf16, "fp16": default_hooks.fp16_compress_hook}


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
        "gloo", init_method=f"tcp://{options.meet}", rank=options.number, world_size=options.ranks,
        timeout=timedelta(hours=1),
    )  # fmt: skip
    whole = nn.parallel.DistributedDataParallel(
        LossOf(pace.model), bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True
    )
    if hook := HOOKS[options.hook]:
        whole.register_comm_hook(None, hook)
    for step in range(options.steps):
        began, batch = pace.begin(step)
        loss = whole(batch)
        pace.optimizer.zero_grad(set_to_none=True)
        pace.pad(began)
        loss.backward()
        nn.utils.clip_grad_norm_(pace.model.parameters(), 1.0)
        pace.optimizer.step()
        pace.end(step, began, loss.item())
    if options.save is not None:
        torch.save(pace.model.state_dict(), options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
