"""One rank of a learner with several ranks, for `test_islands`: python island_rank.py KIND ADDRESS NAME STEPS FOLDER.

The rank trains a small model with this kind of parallelism. It writes the values that the test compares to
FOLDER/NAME-RANK.json. With KIND/device, it codes CPU tensors as if they were on a device.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import atoll
import torch
import torch.distributed as dist
from atoll import learner as public
from atoll.boundary.device_values import DeviceValues
from atoll.fragments.adoption import Track
from atoll_wire.codec import frame_codec
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORDS = 2003  # as 257, no multiple of 4 ranks; torch needs an even size between tensor-parallel layers
PACE_S = 0.1


def model_of(kind: str) -> tuple[nn.Module, dict[str, Any], int, int]:
    """Returns the model, the learner's options, and this rank's number and count among data-parallel ranks."""
    torch.manual_seed(0 if kind == "one" else 1)
    model: nn.Module = nn.Sequential(nn.Embedding(WORDS, 257), nn.Linear(257, 1032), nn.ReLU(), nn.Linear(1032, WORDS))
    if kind == "one":
        return model, {}, 0, 1
    rank, size = dist.get_rank(), dist.get_world_size()
    split = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), {}, rank, size
    if kind == "fsdp":
        for layer in (model[1], model[3]):
            fully_shard(layer)
        fully_shard(model)
        return model, {}, rank, size
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
        return fully_shard(model, mesh=mesh), {}, rank, size
    if kind == "tp":
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, split), {"same_batch": mesh}, 0, 1
    assert kind == "fsdp+tp", kind
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], split)
    fully_shard(model, mesh=mesh["dp"])
    return model, {"same_batch": mesh["tp"]}, mesh["dp"].get_local_rank(), 2


def main() -> None:
    kind, address, name, steps, folder = sys.argv[1:]
    kind, _, on_device = kind.partition("/")
    if on_device:
        public.coding_device = lambda _: torch.device("cpu")
    torch.set_num_threads(1)
    if kind != "one":
        dist.init_process_group("gloo")
    rank = dist.get_rank() if kind != "one" else 0
    (Path(folder) / f"{name}-{rank}.pid").write_text(str(os.getpid()))
    model, options, number, count = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator, breath = torch.Generator().manual_seed(100 + number), threading.Event()
    anchors: dict[str, list[Any]] = {}
    losses: list[float] = []
    with atoll.Learner(model, optimizer, address, name, connect_timeout_s=60, drain_s=20, **options) as learner:
        boundary = learner._boundary
        assert boundary is not None

        def note() -> None:
            for fragment, (track, routes) in enumerate(
                zip(boundary.local.tracks, boundary.local._values._routes, strict=True)
            ):
                key = f"{fragment}/{track.version}"
                if key not in anchors:
                    anchors[key] = [routes.division.run.first, *checked(track)]

        note()
        while not (Path(folder) / "go").exists():  # all learners have joined
            breath.wait(PACE_S)
        run_tokens = []
        for _ in range(int(steps)):
            x = torch.randint(0, WORDS, (8 * (4 // count),), generator=generator)
            loss = nn.functional.cross_entropy(model(x), (x * 7 + 3) % WORDS)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            breath.wait(PACE_S)
            learner.step(tokens=len(x), loss=loss.item())
            losses.append(loss.item())
            run_tokens.append(learner.run_tokens)
            note()
        stats = learner.stats()
    said = {"anchors": anchors, "losses": losses, "run_tokens": run_tokens, "tokens": learner.stats().tokens}
    said |= {
        "on_device": isinstance(boundary.local._values, DeviceValues),
        "fingerprint": boundary._layout.fingerprint.hex(),
        "merged": learner.stats().merged,
        "mismatches": stats.mismatches,
        "versions": stats.versions,
    }
    (Path(folder) / f"{name}-{rank}.json").write_text(json.dumps(said))
    if kind != "one":
        dist.destroy_process_group()


def checked(track: Track) -> tuple[int, int]:
    return frame_codec.vector_crc32c(track.anchor), track.anchor.nbytes


if __name__ == "__main__":
    main()
