"""One rank of a learner whose model no process holds, for `test_sharded_models`.

python -m tests.end_to_end.sharded_rank ADDRESS FOLDER [overwrite]

The model is built on the meta device and sharded with mixed precision. It is evaluated before the learner joins and
around each step, so that `fully_shard` leaves the root module unsharded. With
"overwrite", the rank overwrites its parameters in one step. It writes FOLDER/rank-N.pt.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import atoll
import torch
import torch.distributed as dist
from atoll.ranks.placements import local_tensor
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.end_to_end.island_rank import checked

WORDS, STEPS, BATCH, PACE_S = 32, 80, 32, 0.02
WRITTEN = 60  # the step in which the program overwrites the parameters
HALF = torch.bfloat16


class Scale(nn.Module):
    """One factor, of which all but one rank hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def layers() -> nn.Sequential:
    """Returns a model whose tensors cannot be divided into equal shards."""
    return nn.Sequential(nn.Embedding(WORDS, 15), Scale(), nn.Linear(15, 33), nn.ReLU(), nn.Linear(33, WORDS))


def sharded() -> nn.Sequential:
    """Returns the model without usable values, which the learner must take from the run."""
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = layers()
    fully_shard(model[2], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(local_tensor(parameter), 7.0)
    return model


class Evaluated:
    """A sharded model with its shards, which stay the same objects while the model has unsharded parameters."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model, self.shards = model, dict(model.named_parameters())
        self.plain = layers().to(HALF)

    def wholes(self) -> dict[str, torch.Tensor]:
        return {name: shard.full_tensor() for name, shard in self.shards.items() if isinstance(shard, DTensor)}

    @torch.no_grad()
    def write(self) -> None:
        """Overwrites all values, as a program does that loads other weights."""
        self.model.reshard()
        for shard in self.shards.values():
            local_tensor(shard).add_(3.0)

    @torch.no_grad()
    def outputs(self) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.arange(WORDS)).float()
        assert not isinstance(self.model[0].weight, DTensor), "the evaluation must leave the root module unsharded"
        return found

    @torch.no_grad()
    def outputs_of_shards(self) -> torch.Tensor:
        """Returns the outputs of a plain model with the values of all ranks' shards."""
        self.plain.load_state_dict(self.wholes())
        found: torch.Tensor = self.plain(torch.arange(WORDS)).float()
        return found


def main() -> None:
    address, folder, *overwrite = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, breath = dist.get_rank(), threading.Event()
    model = sharded()
    optimizer, mine = torch.optim.AdamW(model.parameters(), 3e-3), Evaluated(model)
    mine.outputs()
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {"losses": [], "moved": [], "stale": [], "anchors": {}}
    with atoll.Learner(model, optimizer, address, "island", connect_timeout_s=60, drain_s=20) as learner:
        boundary = learner._boundary
        assert boundary is not None
        found["begun"] = mine.wholes()
        (Path(folder) / f"joined-{rank}").touch()
        while not (Path(folder) / "go").exists():  # the other learner has joined
            breath.wait(PACE_S)
        for number in range(STEPS):
            x = torch.randint(0, WORDS, (BATCH,), generator=generator)
            loss = nn.functional.cross_entropy(model(x).float(), (x * 7 + 3) % WORDS)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if overwrite and number == WRITTEN:
                mine.write()
            before = mine.outputs()
            breath.wait(PACE_S)
            learner.step(tokens=BATCH)
            after = mine.outputs()
            found["losses"].append(loss.item())
            found["moved"].append(float((after - before).abs().max()))
            found["stale"].append(float((after - mine.outputs_of_shards()).abs().max()))
            for track, routes in zip(boundary.local.tracks, boundary.local._values._routes, strict=True):
                key = f"{routes.division.fragment.index}/{track.version}"
                if key not in found["anchors"]:
                    found["anchors"][key] = [routes.division.run.first, *checked(track)]
    found["types"] = [str(local_tensor(shard).dtype) for shard in mine.shards.values()]
    found["sizes"] = [local_tensor(shard).numel() for shard in mine.shards.values()]
    found["merged"], found["abandoned"] = learner.stats().merged, learner.stats().abandoned_tokens
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
