"""Writes cuts of the published model into a torch model. The values are the same as after loading an export."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from atoll_wire.layout.layout import FragmentLayout, Layout, TensorSpec
from atoll_wire.model_file.model_file import owners_of
from torch import nn

from atoll.dtensors import is_dtensor
from atoll.errors import FollowerError
from atoll.follower.cuts import Cut

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
TRAINED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelTensors:
    """A model's parameters and buffers. applied: the cut that they hold, or None."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.applied: Cut | None = None

    def apply(self, cut: Cut) -> bool:
        """Writes a cut into the model. Returns False if the model already has it.

        Raises FollowerError if the model's tensors differ from the run's.
        """
        if cut.same_as(self.applied):
            return False
        before = self.applied
        with torch.no_grad():
            state = {
                name: value.detach()
                for name, value in self._model.state_dict(keep_vars=True).items()
                if isinstance(value, torch.Tensor)
            }
            if before is None:
                check(state, cut)
                write_fixed(state, cut)
            for fragment in cut.layout.fragments:
                values = cut.fragments[fragment.index]
                if before is None or before.fragments.get(fragment.index) is not values:
                    write_fragment(state, cut.layout, fragment, torch.from_numpy(values.theta_pub))
        self.applied = cut
        return True


def check(state: Mapping[str, torch.Tensor], cut: Cut) -> None:
    """Raises FollowerError unless a model's tensors have the same names and shapes as the run's tensors.

    The model's tensors must also be whole and on a real device. state: the model's tensors by name.
    """
    owners = owners_of(cut.layout)
    shapes = {name: entry.shape for name, entry in cut.fixed.entries.items()}
    shapes |= {name: cut.layout.tensors[index].shape for name, index in owners.items()}
    fix = "use the model that the run trains"
    for name, shape in shapes.items():
        if name not in state:
            raise FollowerError(f'the model lacks "{name}", which the run has: {fix}')
        if tuple(state[name].shape) != tuple(shape):
            raise FollowerError(f'"{name}" has shape {list(state[name].shape)}, but {list(shape)} in the run: {fix}')
    for name, tensor in state.items():
        if name not in shapes:
            raise FollowerError(f'the model has "{name}", which the run does not have: {fix}')
        if is_dtensor(tensor) or tensor.is_meta:
            kind = "divided among ranks" if is_dtensor(tensor) else "on the meta device"
            raise FollowerError(f'"{name}" is {kind}: give a model whose tensors are whole and on a real device')


def write_fixed(state: Mapping[str, torch.Tensor], cut: Cut) -> None:
    """Writes the frozen parameters and buffers of a cut into the model's tensors."""
    owners = owners_of(cut.layout)
    for name, entry in cut.fixed.entries.items():
        if name not in owners:
            values = torch.from_numpy(cut.fixed.raw(name).copy()).view(TYPES[entry.dtype])
            state[name].copy_(values.reshape(entry.shape))


def write_fragment(
    state: Mapping[str, torch.Tensor], layout: Layout, fragment: FragmentLayout, values: torch.Tensor
) -> None:
    """Writes a fragment's values into the model's tensors. values: float32 (fragment.length,)."""
    for piece in fragment.pieces:
        tensor = layout.tensors[piece.tensor]
        part = values[piece.offset : piece.offset + piece.length].to(TRAINED[tensor.dtype])
        for target in _targets(state, tensor):
            if target.is_contiguous():
                target.view(-1)[piece.start : piece.start + piece.length].copy_(part)
            else:
                flat = target.contiguous().view(-1)
                flat[piece.start : piece.start + piece.length].copy_(part)
                target.copy_(flat.view(target.shape))


def _targets(state: Mapping[str, torch.Tensor], tensor: TensorSpec) -> list[torch.Tensor]:
    """Returns the model's tensors with the names of a run's tensor. Names that share memory count once."""
    found = {state[name].data_ptr(): state[name] for name in (tensor.name, *tensor.tied_names)}
    return list(found.values())
