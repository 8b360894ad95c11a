"""Finds the part of each parameter that this rank holds, from the placements of DTensors.

FSDP2, HSDP, tensor parallelism and their combinations store a parameter as a DTensor. Each dimension of its mesh shards
or replicates the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.dtensors import is_dtensor, is_fsdp_module
from atoll.errors import LearnerError
from atoll.ranks.tensor_part import Range, TensorPart, chunk


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter as a plain tensor that shares the parameter's memory."""
    with torch.no_grad():  # otherwise, autograd records the call of to_local
        return parameter.to_local() if is_dtensor(parameter) else parameter.detach()


def addresses(parameters: Collection[torch.Tensor]) -> list[int]:
    """Returns the address of this rank's part of each parameter. It is fast enough for a call in every step."""
    if not any(is_dtensor(each) for each in parameters):
        return [each.data_ptr() for each in parameters]
    with torch.no_grad():
        return [(each.to_local() if is_dtensor(each) else each).data_ptr() for each in parameters]


def part_of(name: str, parameter: torch.Tensor) -> TensorPart:
    """Returns the part of a parameter that this rank holds. Raises LearnerError for an unsupported placement."""
    if not is_dtensor(parameter):
        return TensorPart.whole(parameter.shape)
    mesh, placements = parameter.device_mesh, parameter.placements
    here = mesh.get_coordinate()
    if here is None:
        raise LearnerError(f'"{name}" is on a mesh without this rank: build the model on a mesh of all ranks')
    ranges: list[tuple[Range, ...]] = [((0, size),) for size in parameter.shape]
    order = sorted(range(len(placements)), key=lambda n: _after(n, placements[n]))
    for number in order:
        placement = placements[number]
        if placement.is_partial():
            raise LearnerError(f'"{name}" holds partial sums ({placement}): shard or replicate this parameter instead')
        if not placement.is_replicate():
            dimension = getattr(placement, "dim", 0) % len(ranges)  # fully_shard with TP has a private placement type
            ranges[dimension] = chunk(ranges[dimension], here[number], mesh.size(number))
    part, local = TensorPart(tuple(parameter.shape), tuple(ranges)), tuple(local_tensor(parameter).shape)
    if part.local_shape != local:
        raise LearnerError(
            f'"{name}" with placements {placements} has the local shape {local}, but {part.local_shape} was expected: '
            "shard the model with fully_shard or parallelize_module"
        )
    return part


def reshard(model: nn.Module) -> None:
    """Reshards all modules that `fully_shard` manages.

    After an evaluation, `fully_shard` may leave the root module unsharded. The next forward pass would then not use
    values that were written to the shards.
    """
    for module in model.modules():
        if is_fsdp_module(module):
            module.reshard()


def counts_tokens(model: nn.Module, names: Iterable[tuple[str, nn.Parameter]], same_batch: DeviceMesh | None) -> bool:
    """Returns whether to count this rank's tokens. Ranks that train on the same batch count its tokens once.

    names: the trainable parameters with their names. same_batch: the mesh of ranks that train on the same batch.
    Raises LearnerError if `same_batch` is None, but ranks along a mesh dimension may train on the same batch.
    """
    if same_batch is not None:
        return not any(same_batch.get_coordinate() or ())
    managed = _data_dimensions(model)
    for name, parameter in names:
        data = managed.get(id(parameter), 0)
        if is_dtensor(parameter) and parameter.device_mesh.ndim > data and parameter.device_mesh.size() > 1:
            dimensions = parameter.device_mesh.mesh_dim_names
            example = f', such as mesh["{dimensions[-1]}"]' if dimensions else ""
            raise LearnerError(
                f'"{name}" is a DTensor on a {parameter.device_mesh.ndim}-dimensional mesh, and fully_shard manages '
                f"{data} of its dimensions, so several ranks may train on the same batch: pass the mesh of these ranks "
                f"as same_batch={example}"
            )
    return True


def _data_dimensions(model: nn.Module) -> dict[int, int]:
    """Returns the number of mesh dimensions that `fully_shard` manages for each parameter, by the parameter's id.

    Ranks along these dimensions train on different batches. Parameters that `fully_shard` does not manage are missing.
    """
    found = {}
    for state in (module._get_fsdp_state() for module in model.modules() if is_fsdp_module(module)):
        # torch has no public API for this, and older versions have at most one group.
        groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in filter(None, groups):
            for each in group.fsdp_params:
                place = each._module_info  # the parameter there may be newer than in `each.sharded_param`
                found[id(getattr(place.module, place.param_name))] = group.mesh_info.mesh.ndim
    return found


def _after(number: int, placement: object) -> tuple[int, int]:
    """Returns a key that sorts mesh dimensions in the order in which they split the tensor.

    fully_shard splits the tensor after tensor parallelism, and marks its placement with `split_factor`.
    """
    strided = getattr(placement, "split_factor", 1) > 1
    return (1, -number) if strided else (0, number)
