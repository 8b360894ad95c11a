"""Reads which part of each parameter this rank holds, from the placements of DTensors.

Any combination of FSDP2, HSDP and tensor parallelism is a DTensor whose mesh dimensions shard or replicate it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from atoll.errors import LearnerError
from atoll.ranks.tensor_part import Range, TensorPart, chunk


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter, which shares the parameter's memory."""
    with torch.no_grad():  # without it, DTensor records an operation
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def part_of(name: str, parameter: nn.Parameter) -> TensorPart:
    """Returns the part of a parameter that this rank holds. Raises LearnerError for a placement that has no part."""
    if not isinstance(parameter, DTensor):
        return TensorPart.whole(parameter.shape)
    mesh, placements = parameter.device_mesh, parameter.placements
    here = mesh.get_coordinate()
    if here is None:
        raise LearnerError(f'"{name}" is on a mesh without this rank: every rank must hold a part of every parameter')
    ranges: list[tuple[Range, ...]] = [((0, size),) for size in parameter.shape]
    order = sorted(range(len(placements)), key=lambda n: _after(n, placements[n]))
    for number in order:
        placement = placements[number]
        if placement.is_partial():
            raise LearnerError(f'"{name}" holds partial sums ({placement}): use a sharded or replicated parameter')
        if not placement.is_replicate():
            dimension = getattr(placement, "dim", 0) % len(ranges)  # torch's type for fully_shard with TP is private
            ranges[dimension] = chunk(ranges[dimension], here[number], mesh.size(number))
    part, local = TensorPart(tuple(parameter.shape), tuple(ranges)), tuple(local_tensor(parameter).shape)
    if part.local_shape != local:
        raise LearnerError(
            f'"{name}" with placements {placements} has the local shape {local}, but {part.local_shape} was expected: '
            "use the placements of fully_shard or parallelize_module"
        )
    return part


def reshard(model: nn.Module) -> None:
    """Makes the model's parameters the sharded ones. After evaluation, `fully_shard` may leave the root unsharded.

    Values written to the shards would then not reach the next forward pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def counts_tokens(model: nn.Module, names: Iterable[tuple[str, nn.Parameter]], same_batch: DeviceMesh | None) -> bool:
    """Returns whether this rank's tokens count. Ranks that train on the same batch count it once.

    same_batch: the mesh of such ranks. Raises LearnerError if a mesh dimension may be one of them, and it is not given.
    """
    if same_batch is not None:
        return not any(same_batch.get_coordinate() or ())
    data = max((_data_dimensions(module) for module in model.modules()), default=0)
    for name, parameter in names:
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > data and parameter.device_mesh.size() > 1:
            dimensions = parameter.device_mesh.mesh_dim_names or ("the mesh",)
            raise LearnerError(
                f'"{name}" is a DTensor on the mesh {dimensions}, and fully_shard manages {data} of its dimensions: '
                f'pass the mesh whose ranks train on the same batch, such as same_batch=mesh["{dimensions[-1]}"]'
            )
    return True


def _data_dimensions(module: nn.Module) -> int:
    """Returns the number of mesh dimensions that `fully_shard` manages. Their ranks train on different batches."""
    if not isinstance(module, FSDPModule):
        return 0
    group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)  # torch has no public way
    info = getattr(group, "mesh_info", None)
    return info.mesh.ndim if info is not None else 0


def _after(number: int, placement: object) -> tuple[int, int]:
    """Returns a mesh dimension's turn in cutting. fully_shard cuts after tensor parallelism, which it marks so."""
    strided = getattr(placement, "split_factor", 1) > 1
    return (1, -number) if strided else (0, number)
