"""One rank of a learner that trains a fixed schedule, for `test_islands`: lockstep_rank.py ADDRESS FOLDER.

Each outer step has INNER_STEPS inner steps, then a wait until the work is merged and adopted. Two learners that
train on the same data therefore take the same outer steps, regardless of their numbers of ranks. Rank 0 saves the final
parameters.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import atoll
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

OUTER_STEPS, INNER_STEPS, BATCH, WIDTH = 10, 8, 32, 48


def main() -> None:
    address, folder = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 257), nn.Tanh(), nn.Linear(257, WIDTH))
    rank, ranks = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data, target = torch.Generator().manual_seed(1), torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
    breath = threading.Event()
    with atoll.Learner(model, optimizer, address, f"of-{ranks}", connect_timeout_s=60) as learner:
        for number in range(1, OUTER_STEPS + 1):
            for _ in range(INNER_STEPS):
                x = torch.randn(BATCH, WIDTH, generator=data)
                mine = x[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
                optimizer.zero_grad()
                nn.functional.mse_loss(model(mine), torch.sin(mine @ target)).backward()
                optimizer.step()
            learner.step(tokens=INNER_STEPS * len(mine))
            optimizer.zero_grad()
            while learner.stats().versions != (number,):
                breath.wait(0.01)
                optimizer.step()  # a step without training, because the core opens rounds only for learners that step
                learner.step(tokens=0)
        # Not after the block: gloo frees the tensors of a collective call in a thread, shortly after the call. If the
        # interpreter is ending then, torch aborts the process. Leaving the run takes long enough.
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(whole, Path(folder) / f"of-{ranks}.pt")
    if ranks > 1:
        dist.destroy_process_group()


main()
