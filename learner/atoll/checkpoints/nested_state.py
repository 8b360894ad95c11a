"""Splits a nested state into tensors and the rest, and joins them again.

torch.distributed.checkpoint stores the tensors by key. Scalars belong to the rest, which is stored as bytes that
torch.load accepts with weights_only=True.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from atoll.dtensors import is_dtensor
from atoll.ranks.placements import local_tensor

Path: TypeAlias = tuple[Any, ...]  # keys and indices that lead to a value in a nested state


CURE = "return tensors and plain values from its state_dict()"
ALLOW = "allow the type with torch.serialization.add_safe_globals"
DEEPEST = 50  # limit on the length of a path in a message


class StateError(Exception):
    """State that a checkpoint cannot hold, or that does not fit the model."""


@dataclass(slots=True)
class Apart:
    """A state without its tensors.

    state: the rest, with None in place of each tensor. tensors: path and key of each tensor. what: the state's name in
    messages.
    """

    state: Any
    tensors: list[tuple[Path, str]]
    what: str


def take_apart(
    what: str, state: object, key_of: Callable[[Path, torch.Tensor], str], tensors: dict[str, torch.Tensor]
) -> Apart:
    """Returns a copy of a state without its tensors. Adds the tensors to `tensors` without copying them.

    what: the state's name in messages. key_of: a function that returns the key of the tensor at a path. Raises
    StateError.
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
            return _copy(value, what, path)
        if local_tensor(value).is_meta:
            raise StateError(f"{_place(what, path)} is a tensor on the meta device, which has no values: {CURE}")
        scalar = not value.dim() and not is_dtensor(value)
        if scalar or not _is_plain(local_tensor(value)):
            return local_tensor(value).to("cpu", copy=True)
        key = key_of(path, value)
        while key in tensors:
            key += "'"
        tensors[key] = value
        paths.append((path, key))
        return None

    try:
        return Apart(rest(state, ()), paths, what)
    except RecursionError:
        raise StateError(f"{what} contains itself, or is nested too deeply: {CURE}") from None


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


def pack(apart: Apart) -> torch.Tensor:
    """Returns a state's non-tensor part as bytes, uint8 (bytes,). Raises StateError if torch.load would refuse it."""
    packed, error = _packed({"state": apart.state, "tensors": apart.tensors})
    if error is not None:
        raise StateError(_refused(apart.state, apart.what, ())) from error
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def unpack(name: str, packed: torch.Tensor) -> Apart:
    """Returns the state that `pack` packed. Raises StateError if it cannot be read."""
    try:
        found = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
        return Apart(found["state"], [(tuple(path), str(key)) for path, key in found["tensors"]], name)
    except (pickle.UnpicklingError, LookupError, TypeError, ValueError, RuntimeError, EOFError) as error:
        raise StateError(f'"{name}" cannot be read ({first_line(error)})') from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's type if there is none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


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


def _copy(value: object, what: str, path: Path) -> object:
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise
    except Exception as error:
        found = f"{_place(what, path)} is of type {_type(value)}, which cannot be copied ({first_line(error)})"
        raise StateError(f"{found}: {CURE}") from error


def _packed(value: object) -> tuple[bytes, Exception | None]:
    """Returns a value as bytes that torch.load accepts, or the error that prevents this."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # pickle calls methods of the user's objects
        return b"", error
    return file.getvalue(), None


def _refused(value: object, what: str, path: Path) -> str:
    """Returns the message about the innermost value that cannot be packed. value: the value at `path`."""
    reason = f"which torch.load refuses with weights_only=True: {CURE}, or {ALLOW}"
    items: list[tuple[Any, object]] = []
    if isinstance(value, dict):
        for key in value:
            if _packed(key)[1] is not None:
                return f"{_place(what, path)} has a key of type {_type(key)}, {reason}"
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    for key, each in items:
        if len(path) < DEEPEST and _packed(each)[1] is not None:
            return _refused(each, what, (*path, key))
    return f"{_place(what, path)} is of type {_type(value)}, {reason}"


def _place(what: str, path: Path) -> str:
    return what + "".join(f"[{json.dumps(step) if isinstance(step, str) else repr(step)}]" for step in path)


def _type(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can be copied into ordinary memory."""
    return type(tensor) in {torch.Tensor, nn.Parameter} and tensor.layout is torch.strided and not tensor.is_quantized
