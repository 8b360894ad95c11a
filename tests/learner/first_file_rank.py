"""One rank that writes a sharded model's initial parameters, for `test_first_file_of_ranks`.

python -m tests.learner.first_file_rank RANK SIZE FOLDER

The value of an element is its tensor's number plus its row's number. Rank 0 writes FOLDER/first.safetensors. Each rank
writes the bytes by which its peak memory grew, and the error of a write that failed, to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from atoll.model.parameters import Parameters
from atoll.ranks.placements import local_tensor
from atoll.ranks.rank_group import rank_group
from torch import nn
from torch.distributed.fsdp import fully_shard

LAYERS, ROWS, COLUMNS = 8, 2001, 2048  # 16 MB in each layer


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)))


def sharded() -> Parameters:
    """Returns the parameters of a model that this rank never holds whole."""
    with torch.device("meta"):
        model = layers()
    for layer in model:
        fully_shard(layer)
    model.to_empty(device="cpu")
    parameters = Parameters(model, torch.optim.SGD(model.parameters(), 0.1))
    for number, (value, part) in enumerate(zip(parameters.values, parameters.parts, strict=True)):
        rows = torch.cat([torch.arange(*each) for each in part.ranges[0]])
        local_tensor(value).copy_((number + rows.float())[:, None].expand(-1, COLUMNS))
    return parameters


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux reports the peak of a process"
    return 1024 * int(found[1])


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    parameters, ranks = sharded(), rank_group()
    fully_shard(nn.Linear(2, 2)).weight.full_tensor()  # torch loads what it needs to gather a tensor
    before = peak_bytes()
    parameters.save(None if rank else folder / "first.safetensors")
    said: dict[str, Any] = {"grown": peak_bytes() - before, "error": ""}
    try:
        parameters.save(None if rank else folder / "missing" / "first.safetensors")
    except OSError as error:
        said["error"] = str(error)
    assert ranks.gathered(b"alive") == [b"alive"] * size, "the ranks' calls must still match"
    ranks.leave()
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
