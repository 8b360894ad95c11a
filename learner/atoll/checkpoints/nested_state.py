"""Takes a nested state apart into tensors and the rest, and joins them again.

torch.distributed.checkpoint stores the tensors by key. Scalars belong to the rest, which is stored as bytes that
torch.load accepts with weights_only=True.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from atoll.ranks.placements import local_tensor

Path: TypeAlias = tuple[Any, ...]  # keys and indices that lead to a value in a nested state


class StateError(Exception):
    """State that a checkpoint cannot hold, or that does not fit the model."""


@dataclass(slots=True)
class Apart:
    """A state without its tensors.

    state: the rest, with None in place of each tensor. tensors: path and key of each tensor.
    """

    state: Any
    tensors: list[tuple[Path, str]]


def take_apart(state: object, key_of: Callable[[Path, torch.Tensor], str], tensors: dict[str, torch.Tensor]) -> Apart:
    """Returns a copy of a state without its tensors, which are added to `tensors` uncopied.

    key_of: returns the key of the tensor at a path.
    """
    paths: list[tuple[Path, str]] = []

    def rest(value: object, path: Path) -> object:
        if type(value) in {dict, OrderedDict}:
            made = copy.copy(value)
            assert isinstance(made, dict)
            for name, each in made.items():
                made[name] = rest(each, (*path, name))
            return made
        if type(value) is list:
            return [rest(each, (*path, index)) for index, each in enumerate(value)]
        if isinstance(value, np.generic):  # a scheduler's learning rate, for example
            return value.item()
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        scalar = not value.dim() and not isinstance(value, DTensor)
        if scalar or not _is_plain(local_tensor(value)):
            return local_tensor(value).to("cpu", copy=True)
        key = key_of(path, value)
        while key in tensors:
            key += "'"
        tensors[key] = value
        paths.append((path, key))
        return None

    return Apart(rest(state, ()), paths)


def join(apart: Apart, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401
    """Returns the state with its tensors. Changes `apart.state`."""
    state = [apart.state]
    for path, key in apart.tensors:
        inner: Any = state
        for step in (0, *path)[: len(path)]:
            inner = inner[step]
        inner[(0, *path)[-1]] = tensors[key]
    return state[0]


def at(state: object, path: Path) -> object:
    """Returns the value at a path, or None if there is none."""
    for step in path:
        try:
            state = state[step]  # type: ignore[index]
        except (LookupError, TypeError):
            return None
    return state


def pack(name: str, apart: Apart) -> torch.Tensor:
    """Returns a state without its tensors as bytes, uint8 (bytes,). Raises StateError if it could not be loaded."""
    file = io.BytesIO()
    try:
        torch.save({"state": apart.state, "tensors": apart.tensors}, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise StateError(
            f'"{name}" has a value that torch.load refuses with weights_only=True: return tensors and plain values '
            "from its state_dict(), or allow its type with torch.serialization.add_safe_globals"
        ) from error
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpack(name: str, packed: torch.Tensor) -> Apart:
    """Returns what `pack` packed. Raises StateError."""
    try:
        found = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
        return Apart(found["state"], [(tuple(path), str(key)) for path, key in found["tensors"]])
    except (pickle.UnpicklingError, LookupError, TypeError, ValueError, RuntimeError, EOFError) as error:
        raise StateError(f'"{name}" cannot be read ({str(error).splitlines()[0]})') from error


def equal(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Returns whether two nested states are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can be copied into ordinary memory."""
    return type(tensor) in {torch.Tensor, nn.Parameter} and tensor.layout is torch.strided and not tensor.is_quantized
