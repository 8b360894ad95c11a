"""Trains a small transformer, sharded with FSDP2, as one learner of a run.

torchrun --standalone --nproc-per-node 4 examples/torchrun_fsdp2.py --server 127.0.0.1:7070 --name eu-west

Start one such job on each island, with its own name and data. The text here is random, so that the example needs no
download: each token determines the next.
"""

from __future__ import annotations

import argparse
import os
import zlib

import atoll
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

WORDS, WIDTH, LAYERS, LENGTH = 256, 128, 4, 64


class Model(nn.Module):
    """A causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next tokens. tokens: int64 (batch, length)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def text(batch: int, generator: torch.Generator) -> torch.Tensor:
    """Returns int64 (batch, LENGTH + 1) of tokens, each of which follows from the one before."""
    tokens = [torch.randint(0, WORDS, (batch,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 17) % WORDS)
    return torch.stack(tokens, dim=1)


def main() -> None:
    """Trains for --steps steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", required=True, help="HOST:PORT of a core or front")
    parser.add_argument("--name", required=True, help="this learner's name, unique in the run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoints", help="directory for the optimizer's state, the same for all ranks")
    parser.add_argument("--tls", help="directory of certificates from `atoll certs`")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    # No rank ever holds the whole model: it is built without memory, sharded, and only then given values.
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        mine: torch.Tensor = parameter.to_local()  # type: ignore[operator]
        if parameter.ndim > 1:
            nn.init.normal_(mine, std=0.02)
        else:
            nn.init.constant_(mine, float(name.endswith("weight")))  # norms scale by 1, and biases are 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(zlib.crc32(f"{options.name} {dist.get_rank()}".encode()))
    where = {"server": options.server, "name": options.name, "tls": options.tls}
    with atoll.Learner(model, optimizer, **where, checkpoint_dir=options.checkpoints) as learner:
        for step in range(1, options.steps + 1):
            tokens = text(8, generator).to(device)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=tokens[:, 1:].numel())
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}, versions {learner.stats().versions}", flush=True)
    dist.destroy_process_group()


main()
