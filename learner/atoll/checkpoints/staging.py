"""Copies a state at a step boundary, so that a background thread can write it while training changes the original.

A nested state is split into large tensors, which are copied into memory that is kept for the next checkpoint, and the
rest, which is copied at once.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

OBJECTS = "objects."  # prefix of the keys of packed objects
SMALL = 64  # tensors with fewer values are part of the rest

Path = tuple[Any, ...]  # keys and indices that lead to a value in a nested state


class StateError(Exception):
    """State that a checkpoint cannot hold, or that does not fit the model."""


@dataclass(slots=True)
class Staged:
    """A copied state. tensors: large tensors by key. objects: the rest of each nested state by key."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


class Staging:
    """Copies states one after another. Its memory is reused, so a copy must be written before the next is made."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor], nested: Mapping[str, object]) -> Staged:
        """Returns a copy in host memory. Waits for the device. tensors: stored as they are, even if they are small."""
        sources = dict(tensors)
        objects = {key: _split(state, key, sources) for key, state in nested.items()}
        kept = self._memory
        self._memory = {key: _memory(source.detach(), kept.pop(key, None)) for key, source in sources.items()}
        kept.clear()
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(list(self._memory.values()), [source.detach() for source in sources.values()])
        return Staged(dict(self._memory), objects)


def joined(key: str, packed: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401
    """Returns a nested state from its packed rest and its tensors. Raises StateError."""
    try:
        rest = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
        state = [rest["state"]]
        for path, name in rest["tensors"]:
            inner = state
            for step in (0, *path[:-1]) if path else ():
                inner = inner[step]
            inner[path[-1] if path else 0] = tensors[name]
    except (pickle.UnpicklingError, LookupError, TypeError, RuntimeError, EOFError) as error:
        raise StateError(f'"{key}" cannot be read ({str(error).splitlines()[0]})') from error
    return state[0]


def pack(key: str, rest: object) -> torch.Tensor:
    """Returns the rest of a nested state as bytes, uint8 (bytes,). Raises StateError if it could not be loaded."""
    file = io.BytesIO()
    try:
        torch.save(rest, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise StateError(
            f'"{key}" has a value that torch.load refuses with weights_only=True: return tensors and plain values '
            "from its state_dict(), or allow its type with torch.serialization.add_safe_globals"
        ) from error
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _memory(source: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Returns host memory for a tensor: the old memory if it fits."""
    fits = old is not None and old.shape == source.shape and old.dtype == source.dtype
    return old if fits and old is not None else torch.empty_like(source, device="cpu", requires_grad=False)


def _split(state: object, key: str, sources: dict[str, torch.Tensor]) -> dict[str, object]:
    """Returns a copy of a nested state without its large tensors, which are added to `sources`."""
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
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if not _is_plain(value) or value.numel() < SMALL:
            return value.detach().to("cpu", copy=True)
        name = ".".join(map(str, (key, *path)))
        while name in sources:
            name += "'"
        sources[name] = value
        paths.append((path, name))
        return None

    return {"state": rest(state, ()), "tensors": paths}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can be copied into ordinary memory."""
    return type(tensor) in {torch.Tensor, nn.Parameter} and tensor.layout is torch.strided and not tensor.is_quantized
