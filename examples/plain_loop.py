"""A plain PyTorch loop as a learner: a small network that separates two spirals.

python examples/plain_loop.py --name eu-west

Start a second learner with another name: both then train one model.
"""

from __future__ import annotations

import argparse
import math
import zlib

import atoll  # before anything that imports grpc
import torch
from torch import nn


def spirals(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns points, float32 (count, 2), and the number of each point's spiral, int64 (count,)."""
    spiral = torch.randint(0, 2, (count,), generator=generator)
    turn = 3 * math.pi * torch.rand(count, generator=generator).sqrt()
    angle = turn + math.pi * spiral
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 10
    return points + 0.02 * torch.randn(count, 2, generator=generator), spiral


def main() -> None:
    """Trains for --steps steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(zlib.crc32(options.name.encode()))  # own data for each learner
    test_points, test_spirals = spirals(1000, torch.Generator().manual_seed(0))

    with atoll.Learner(model, optimizer, server=options.server, name=options.name) as learner:
        for step in range(1, options.steps + 1):
            points, spiral = spirals(64, generator)
            loss = nn.functional.cross_entropy(model(points), spiral)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=len(points), loss=loss.item())
            if step % 500 == 0 or step == options.steps:
                accuracy = (model(test_points).argmax(1) == test_spirals).float().mean()
                merged = learner.stats().merged
                print(f"step {step}: accuracy {accuracy:.3f}, {merged} contributions merged", flush=True)


main()
