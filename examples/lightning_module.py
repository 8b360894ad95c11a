"""A Lightning module as a learner: the callback is all that Atoll needs.

pip install '.[lightning]'
python examples/lightning_module.py --name eu-west
"""

from __future__ import annotations

import argparse
import tempfile
import zlib

import atoll  # noqa: F401 - before anything that imports grpc
import lightning
import torch
from atoll.integrations.lightning import AtollCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(lightning.LightningModule):
    """Compresses vectors of 32 values to 8."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8), nn.Linear(8, 64), nn.Linear(64, 32))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Returns the mean squared error of a batch."""
        (vectors,) = batch
        return nn.functional.mse_loss(self.net(vectors), vectors)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def vectors(count: int, seed: int) -> torch.Tensor:
    """Returns vectors that lie near an 8-dimensional plane: float32 (count, 32)."""
    plane = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) / 8**0.5
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)) @ plane


def main() -> None:
    """Trains for --steps steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070", help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    module, held_out = Autoencoder(), vectors(1000, seed=1)
    mine = TensorDataset(vectors(64_000, zlib.crc32(options.name.encode())))  # own data for each learner
    callback = AtollCallback(server=options.server, name=options.name, module="net", tokens=lambda batch: len(batch[0]))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=options.steps,
            callbacks=[callback],
            default_root_dir=folder,
            accelerator="auto",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, DataLoader(mine, batch_size=64, shuffle=True))
    with torch.no_grad():
        error = nn.functional.mse_loss(module.net(held_out), held_out)
    print(f"step {options.steps}: held-out error {error:.4f}", flush=True)


main()
