"""Several learners share one dataset. Each unit of each epoch is consumed once, even if learners are killed.

python examples/data_units.py --name eu-west
python examples/data_units.py --name us-east      # at the same time; stop it with kill -9, and start it again

`atoll status` shows how many units are consumed, leased and returned. Both learners end when all units are finished.
"""

from __future__ import annotations

import argparse
from typing import Any

import atoll  # before anything that imports grpc
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Polynomials(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of one polynomial. Every learner must have the same rows in the same order."""

    def __init__(self, rows: int) -> None:
        self._x = torch.linspace(-1, 1, rows)[torch.randperm(rows, generator=torch.Generator().manual_seed(0))]

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index]
        return torch.stack([x, x**2, x**3]), 1 - 2 * x + 3 * x**3


def main() -> None:
    """Trains on each row --epochs times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--rows", type=int, default=20_000, help="number of rows, the same for all learners")
    parser.add_argument("--epochs", type=int, default=2, help="number of epochs, the same for all learners")
    options = parser.parse_args()

    points = Polynomials(options.rows)
    source = atoll.data.Rows(points, unit=32)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = 0
    with atoll.Learner(model, optimizer, server=options.server, name=options.name) as learner:
        units = learner.units(source, "polynomials", epochs=options.epochs)
        while units.more():
            batches: Any = DataLoader(units, batch_size=32)
            for inputs, targets in batches:
                loss = (model(inputs).squeeze(1) - targets).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                learner.step(tokens=len(inputs), loss=loss.item())
                trained += len(inputs)
    inputs, targets = next(iter(DataLoader(points, batch_size=1000)))
    loss = (model(inputs).squeeze(1) - targets).square().mean()  # also if other learners had trained on all rows
    print(f"loss {loss.item():.4f}: {trained} of {options.rows * options.epochs} rows were trained here", flush=True)


main()
