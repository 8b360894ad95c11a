"""A loop with Hugging Face's Accelerate as a learner, with gradient accumulation.

pip install '.[accelerate]'
python examples/accelerate_loop.py --name eu-west
"""

from __future__ import annotations

import argparse
import zlib

import atoll  # noqa: F401 - before anything that imports grpc
import torch
from accelerate import Accelerator
from atoll.integrations.accelerate import AcceleratedLearner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Trains for --steps optimizer steps of two micro-batches each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()

    generator = torch.Generator().manual_seed(zlib.crc32(options.name.encode()))  # own data for each learner
    inputs = torch.rand(64 * options.steps, 4, generator=generator)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: nn.Module = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(inputs), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    server, name = options.server, options.name
    with AcceleratedLearner(
        accelerator, model, optimizer, server=server, name=name, tokens=lambda batch: len(batch[0])
    ) as learner:
        for number, batch in enumerate(loader, start=1):
            with accelerator.accumulate(model):
                (points,) = batch
                loss = nn.functional.mse_loss(model(points).squeeze(1), points.prod(dim=1))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if learner.step(batch, loss=loss.item()):
                break  # the run has reached its token target (`atoll core --total-tokens`)
            if number % (options.steps // 5 * 2) == 0:
                print(f"step {number // 2}: loss {loss.item():.5f}, {learner.metrics()}", flush=True)


main()
