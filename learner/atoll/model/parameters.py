"""The trainable tensors of a PyTorch model and their names, for any device, dtype and wrapper except FSDP1."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from weakref import ref

import numpy as np
import structlog
import torch
from atoll_wire.layout.layout import FragmentLayout, MergeKind, TensorSpec
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.dtensors import is_dtensor
from atoll.errors import LearnerError
from atoll.model import tensor_stream
from atoll.model.optimizer_copies import OptimizerCopies, Pairs
from atoll.ranks.placements import counts_tokens, local_tensor, part_of, reshard

log = structlog.get_logger()

AVERAGES = (
    "BatchNorm's running averages are not shared, so an exported model has the initial ones: recompute them in "
    "that model with torch.optim.swa_utils.update_bn(loader, model)"
)
BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
CHANGED = (
    "buffers changed during training, but learners do not share them and exports contain the initial values: "
    "save these buffers with the learner's own model"
)
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Parameters:
    """The trainable parameters, which require gradients and which an optimizer updates. Tied parameters occur once.

    unshared: names, or patterns such as "teacher.*", of parameters that the run neither trains nor compares.
    copies: a function that returns (parameter, copy) pairs. Optimizers may update these copies instead of the
    parameters (see `optimizer_copies`).
    Raises LearnerError for models that Atoll cannot train.
    """

    def __init__(
        self, model: nn.Module, optimizers: Optimizers, unshared: Collection[str] = (), copies: Pairs = tuple
    ) -> None:
        self.model = model
        self.optimizers = _listed_optimizers(optimizers)
        self.copies = OptimizerCopies(self.optimizers, copies)
        _refuse_fsdp1(model)
        reshard(model)
        self._names = _names(model)
        self._unshared = _matching(self._names, unshared)
        updated = {id(p): p for p in self._updated()}
        self.values: list[nn.Parameter] = []
        self.tensors: tuple[TensorSpec, ...] = ()
        self._frozen: list[tuple[str, nn.Parameter]] = []
        forgotten: list[str] = []
        embeddings = _embedding_like(model)
        specs = []
        for parameter, given in self._names.items():
            if id(parameter) in self._unshared:
                continue
            if not parameter.requires_grad:
                self._frozen.append((given[0], parameter))
            elif id(parameter) not in updated:
                forgotten.append(given[0])
            else:
                self.values.append(parameter)
                kind = MergeKind.AVERAGE if id(parameter) in embeddings else MergeKind.DIRECTION
                dtype = str(parameter.dtype).removeprefix("torch.")
                specs.append(TensorSpec(given[0], tuple(parameter.shape), dtype, kind, tuple(sorted(given[1:]))))
        self.tensors = tuple(specs)
        self.parts = [part_of(t.name, value) for t, value in zip(self.tensors, self.values, strict=True)]
        if len(updated) > len({id(p) for p in self._names} & set(updated)):
            raise LearnerError(
                "the optimizer updates parameters that the model does not have: "
                "create the optimizer from this model's parameters"
            )
        if forgotten:
            raise LearnerError(
                f"none of the learner's optimizers updates {_listed(forgotten)}: pass all optimizers as a list, freeze "
                "the parameters with requires_grad_(False), or name them in unshared="
            )
        self._refuse_shared_memory()
        self._size = self._optimizers_size()
        self._asleep = [parameter for _, parameter in self._frozen if id(parameter) in updated]
        self._buffers = {name: (ref(buffer), _version(buffer)) for name, buffer in self._saved_buffers().items()}

    def reshard(self) -> None:
        """Reshards the model. Call this before writing to this rank's parts."""
        reshard(self.model)

    def check_unchanged(self) -> None:
        """Raises LearnerError if an optimizer trains more parameters than when the Learner was started."""
        if self._optimizers_size() == self._size and not any(parameter.requires_grad for parameter in self._asleep):
            return
        known = {id(parameter) for parameter in self.values} | self._unshared
        new = [p for p in self._updated() if p.requires_grad and id(p) not in known]
        if new:
            names = [self._names.get(parameter, ["a parameter that the model did not have"])[0] for parameter in new]
            raise LearnerError(
                f"{_listed(names)} became trainable after the learner was started and will not be shared: "
                "give the optimizer all parameters first, or name them in unshared="
            )
        self._size = self._optimizers_size()

    def _updated(self) -> list[nn.Parameter]:
        stepped = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        owners = {id(copy): parameter for parameter, copy in self.copies.named()}
        return [owners.get(id(p), p) for p in stepped]

    def _optimizers_size(self) -> int:
        return sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _refuse_shared_memory(self) -> None:
        places: dict[tuple[torch.device, int], str] = {}
        for tensor, value in zip(self.tensors, self.values, strict=True):
            place = (value.device, local_tensor(value).data_ptr())
            if place[1] and places.setdefault(place, tensor.name) != tensor.name:
                raise LearnerError(
                    f'"{places[place]}" and "{tensor.name}" are two parameters that share memory: '
                    "tie them by using one nn.Parameter for both"
                )

    def counts_tokens(self, same_batch: DeviceMesh | None) -> bool:
        """Returns whether to count this rank's tokens. same_batch: see `placements.counts_tokens`."""
        named = ((tensor.name, value) for tensor, value in zip(self.tensors, self.values, strict=True))
        return counts_tokens(self.model, named, same_batch)

    def frozen_digest(self) -> bytes:
        """Returns the SHA-256 of names, shapes, types and bytes of the frozen parameters, in order of names.

        All ranks call this together.
        """
        digest = hashlib.sha256()
        for name, parameter in sorted(self._frozen, key=lambda item: item[0]):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            digest.update(_bytes(parameter).tobytes())
        return digest.digest()

    def save(self, path: Path | None, *, frozen: bool = False) -> None:
        """Writes a run's initial parameters: the state_dict as a safetensors file, in which tied tensors occur once.

        path: the file, or None on a rank that only sends its parts to the other ranks.
        frozen: whether the file holds the frozen parameters. Otherwise, its metadata lists their names.
        All ranks call this together. Each rank gathers one whole tensor at a time. Raises OSError.
        """
        reshard(self.model)
        asleep = {id(parameter) for _, parameter in self._frozen}
        left_out = {n for p, given in self._names.items() if id(p) in asleep and not frozen for n in given}
        skip = {name for tensor in self.tensors for name in tensor.tied_names} | left_out
        tensors = {
            _plain(name): value
            for name, value in self.model.state_dict().items()
            if isinstance(value, torch.Tensor) and _plain(name) not in skip
        }
        own = {given[0] for parameter, given in self._names.items() if id(parameter) in self._unshared}
        metadata = {
            "format": "pt",
            "atoll.initial": json.dumps(sorted(own & set(tensors))),
            "atoll.buffers": json.dumps(sorted(self._saved_buffers())),
            "atoll.frozen": json.dumps(sorted(left_out)),
        }
        wholes = map(_whole, tensors.values())
        try:
            if path is not None:
                tensor_stream.write(path, tensors, wholes, metadata)
        except OSError:
            deque(wholes, maxlen=0)  # otherwise, the other ranks would wait for this rank's parts
            raise
        deque(wholes, maxlen=0)  # ranks that do not write send their parts

    def not_shared(self) -> dict[str, torch.Tensor]:
        """Returns tensors that the run does not hold, by name: unshared parameters, and buffers in a state_dict."""
        own = {given[0]: p.detach() for p, given in self._names.items() if id(p) in self._unshared}
        return own | self._saved_buffers()

    def _saved_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that a state_dict contains, by name."""
        saved = {_plain(name) for name in self.model.state_dict()}
        buffers = {_plain(name): buffer for name, buffer in self.model.named_buffers()}
        return {name: buffer for name, buffer in buffers.items() if name in saved}

    def trainable(self) -> str:
        """Returns the number of trainable parameters and of all parameters, as text."""
        return f"{sum(p.numel() for p in self.values):,} of {sum(p.numel() for p in self._names):,} parameters"

    def names_of(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """Returns a name for each tensor: a parameter's name, the parameter's name for its named copy, or else ""."""
        owners = {id(copy): owner for owner, copy in self.copies.named()}
        names = {id(parameter): given[0] for parameter, given in self._names.items()}
        return [names.get(id(owners.get(id(tensor), tensor)), "") for tensor in tensors]

    def warn(self, learner: str) -> None:
        """Logs a warning if the model has BatchNorm averages, which are not shared. learner: the learner's name."""
        if averages := [_plain(name) for name, _ in self.model.named_buffers() if name.endswith("running_mean")]:
            log.warning(AVERAGES, learner=learner, layers=len(averages), first=averages[0])

    def warn_of_buffers(self, learner: str) -> None:
        """Logs a warning if buffers other than BatchNorm's may have changed since this object was created."""
        now = self._saved_buffers().items()
        known = [(name, self._buffers[name], buffer) for name, buffer in now if name in self._buffers]
        moved = [name for name, (was, seen), buffer in known if was() is not buffer or seen != _version(buffer)]
        if others := [name for name in moved if not name.endswith(BATCH_NORM)]:
            log.warning(CHANGED, learner=learner, buffers=len(others), first=others[0])

    def of(self, fragment: FragmentLayout) -> list[nn.Parameter]:
        """Returns the parameters that have values in a fragment."""
        return [self.values[number] for number in sorted({piece.tensor for piece in fragment.pieces})]

    def on_accelerator(self) -> bool:
        """Returns whether any parameter is outside host memory."""
        return not all(value.device.type == "cpu" for value in self.values)


def _version(tensor: torch.Tensor) -> int:
    """Returns the number of in-place changes of a tensor, or 0 for a tensor that does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _refuse_fsdp1(model: nn.Module) -> None:
    """Raises LearnerError for FSDP1, whose flat parameters mix several tensors."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise LearnerError(
                f'"{name or "the model"}" is sharded with FullyShardedDataParallel (FSDP1), whose flat parameters mix '
                "several tensors: use fully_shard (FSDP2)"
            )


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Returns all names of each parameter, in the model's order. The names have no prefixes of wrappers."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(_plain(name))
    return names


def _matching(names: dict[nn.Parameter, list[str]], patterns: Collection[str]) -> set[int]:
    """Returns the ids of parameters whose name matches a pattern. Raises LearnerError for a pattern without a match."""
    found = set[int]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fits = {id(p) for p, given in names.items() if any(fnmatchcase(name, pattern) for name in given)}
        if not fits:
            raise LearnerError(f'unshared="{pattern}" matches no parameter: give names as in model.named_parameters()')
        found |= fits
    return found


def _listed(names: Sequence[str]) -> str:
    return f'"{names[0]}"' + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _plain(name: str) -> str:
    """Returns a name without the prefixes of torch.compile and DistributedDataParallel."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _listed_optimizers(given: Optimizers) -> list[torch.optim.Optimizer]:
    """Returns all optimizers. Raises LearnerError for a value of another type, such as `model.parameters()`."""
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    optimizers = list(given) if isinstance(given, Iterable) else [given]
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise LearnerError(
                f"optimizer= got a {type(each).__name__}: pass the optimizer, such as "
                "torch.optim.AdamW(model.parameters()), or a list of all optimizers"
            )
    return optimizers


def _embedding_like(model: nn.Module) -> set[int]:
    """Returns the ids of embedding weights and of an output head.

    The output head is the last Linear, if it has as many outputs as an embedding has rows.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    found = {id(table.weight) for table in tables}
    sizes = {table.num_embeddings for table in tables}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if linear and linear[-1].out_features in sizes:
        found.add(id(linear[-1].weight))
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in host memory. If it is a DTensor, all ranks call this together."""
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach().cpu().contiguous()


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    flat = _whole(tensor).reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
