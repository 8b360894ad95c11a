"""A shard's part of the initial parameters gives the same states as the whole file."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from atoll_server.checkpoints.restore import initial_state, initial_states
from atoll_server.checkpoints.shard_part import part_chunks
from atoll_server.checkpoints.tensor_file import open_tensors
from atoll_wire.layout.layout import MergeKind, TensorSpec, plan
from atoll_wire.layout.sharding import divide

SHAPES = {"embedding": (300, 40), "first": (17, 9), "bias": (5,), "second": (64, 33)}
KINDS = {"embedding": MergeKind.AVERAGE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_part_gives_the_same_states_as_the_whole_file(tmp_path, dtype, shards):
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    specs = [
        TensorSpec(name, shape, str(dtype).removeprefix("torch."), KINDS.get(name, MergeKind.DIRECTION))
        for name, shape in SHAPES.items()
    ]
    layout = plan(specs, 4)
    cut = [piece for fragment in layout.fragments for piece in fragment.pieces if piece.name not in SHAPES]
    assert cut, "the layout must cut the largest tensor"
    safetensors.torch.save_file({**tensors, "a buffer": torch.arange(3)}, tmp_path / "whole")
    whole = open_tensors(tmp_path / "whole")
    expected = initial_states(layout, whole)
    total = 0
    for number, owned in enumerate(divide(layout, shards)):
        path = tmp_path / f"part-{number}"
        path.write_bytes(b"".join(part_chunks(layout, whole, owned)))
        total += path.stat().st_size
        part = open_tensors(path)
        for index in owned:
            found = initial_state(layout, part, layout.fragments[index])
            assert found.theta.dtype == np.float32
            assert found.theta.tobytes() == expected[index].theta.tobytes()
            assert found.checksums() == expected[index].checksums()
    assert total < layout.parameters * dtype.itemsize + shards * 2000, "a part must have only its own pieces"
