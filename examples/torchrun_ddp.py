"""One learner with several processes and DistributedDataParallel. Atoll needs only three lines.

torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py --name eu-west

All ranks create the Learner and call `step`. Together they are one learner of the run.
"""

from __future__ import annotations

import argparse
import os
import zlib

import atoll  # before anything that imports grpc
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, LENGTH = 64, 64, 16


def text(batch: int, generator: torch.Generator) -> torch.Tensor:
    """Returns int64 (batch, LENGTH + 1) of tokens, each of which follows from the one before."""
    tokens = [torch.randint(0, WORDS, (batch,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 17) % WORDS)
    return torch.stack(tokens, dim=1)


def main() -> None:
    """Trains for --steps steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")

    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WORDS))
    parallel = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{options.name} {dist.get_rank()}".encode()))

    with atoll.Learner(parallel, optimizer, server=options.server, name=options.name) as learner:
        for step in range(1, options.steps + 1):
            tokens = text(32, generator).to(device)
            loss = nn.functional.cross_entropy(parallel(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=tokens[:, 1:].numel(), loss=loss.item())
            if dist.get_rank() == 0 and (step % 100 == 0 or step == options.steps):
                merged = learner.stats().merged
                print(f"step {step}: loss {loss.item():.3f}, {merged} contributions merged", flush=True)
    dist.destroy_process_group()


main()
