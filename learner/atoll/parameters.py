"""What of a PyTorch model is trained: its tensors and their names, whatever device, type and wrapping they have."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from atoll_wire.layout import Fragment, MergeKind, TensorSpec
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

from atoll.errors import LearnerError


class Parameters:
    """The trainable parameters: those that require gradients and that the optimizer updates, tied ones once."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        _check_whole(model)
        names = _names(model)
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.values: list[nn.Parameter] = []
        self.tensors: tuple[TensorSpec, ...] = ()
        self._frozen: list[tuple[str, nn.Parameter]] = []
        embeddings = _embedding_like(model)
        specs = []
        for parameter, given in names.items():
            if type(parameter).__name__ == "DTensor" or hasattr(parameter, "placements"):
                raise LearnerError(
                    f'"{given[0]}" is sharded (DTensor): only whole parameters can be trained for now, use DDP'
                )
            if parameter.requires_grad and id(parameter) in updated:
                self.values.append(parameter)
                kind = MergeKind.AVERAGE if id(parameter) in embeddings else MergeKind.DIRECTION
                dtype = str(parameter.dtype).removeprefix("torch.")
                specs.append(TensorSpec(given[0], tuple(parameter.shape), dtype, kind, tuple(sorted(given[1:]))))
            else:
                self._frozen.append((given[0], parameter))
        self.tensors = tuple(specs)
        if len(updated) > len({id(p) for p in names} & updated):
            raise LearnerError(
                "the optimizer updates parameters that the model does not have: give both the same model"
            )
        self._refuse_shared_memory()

    def _refuse_shared_memory(self) -> None:
        places: dict[tuple[torch.device, int], str] = {}
        for tensor, value in zip(self.tensors, self.values, strict=True):
            place = (value.device, value.data_ptr())
            if value.data_ptr() and places.setdefault(place, tensor.name) != tensor.name:
                raise LearnerError(
                    f'"{places[place]}" and "{tensor.name}" are two parameters in one memory: tie them by making both '
                    "the same nn.Parameter"
                )

    def frozen_digest(self) -> bytes:
        """SHA-256 over names, shapes, types and bytes of the frozen parameters, in name order."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self._frozen, key=lambda item: item[0]):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            digest.update(_bytes(parameter).tobytes())
        return digest.digest()

    def save(self, path: Path) -> None:
        """Writes the whole state_dict as a safetensors file: the first parameters of a run. Tied tensors once."""
        skip = {name for tensor in self.tensors for name in tensor.tied_names}
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, value in self.model.state_dict().items():
            plain = _plain(name)
            if isinstance(value, torch.Tensor) and plain not in skip:
                copy = value.detach().cpu().contiguous()
                tensors[plain] = copy.clone() if copy.data_ptr() in seen else copy
                seen.add(copy.data_ptr())
        save_file(tensors, path)

    def of(self, fragment: Fragment) -> list[nn.Parameter]:
        """The parameters that a fragment touches."""
        return [self.values[number] for number in sorted({piece.tensor for piece in fragment.pieces})]

    def on_accelerator(self) -> bool:
        """Whether any parameter lies outside the host's memory."""
        return not all(value.is_cpu for value in self.values)


def _check_whole(model: nn.Module) -> None:
    """FSDP's first kind flattens parameters and gives each rank a part: looking at them is a collective, and hangs."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise LearnerError(
                f'"{name or "the model"}" is sharded (FullyShardedDataParallel): only whole parameters can be trained '
                "for now, use DDP"
            )


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter once, in the model's order, with all its names; wrappers leave no trace in them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(_plain(name))
    return names


def _plain(name: str) -> str:
    """Without what torch.compile and DistributedDataParallel put in."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _embedding_like(model: nn.Module) -> set[int]:
    """Weights of embeddings, their tied copies, and an output head: the last Linear as wide as an embedding's table."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    found = {id(table.weight) for table in tables}
    sizes = {table.num_embeddings for table in tables}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if linear and linear[-1].out_features in sizes:
        found.add(id(linear[-1].weight))
    return found


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
