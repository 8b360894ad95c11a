"""Replaces torch's numbers of parameters in an optimizer's state_dict by the parameters' names, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from atoll.checkpoints.nested_state import StateError

STATE, GROUPS, PARAMS = "state", "param_groups", "params"  # keys of torch.optim.Optimizer.state_dict()


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns all parameters of an optimizer, in the order of torch's numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]


def groups(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> list[list[str]]:
    """Returns the names of the parameters in each group. names: the names of `parameters(optimizer)`."""
    if len(set(names)) < len(names):  # a copy has the same name as its parameter: use numbers
        names = [str(number) for number in range(len(names))]
    left: Iterator[str] = iter(names)
    return [list(islice(left, len(group[PARAMS]))) for group in optimizer.param_groups]


def by_name(state: Any, names: Sequence[Sequence[str]]) -> Any:  # noqa: ANN401
    """Returns a state_dict with names in place of numbers. names: the parameters' names by group."""
    if not _is_standard(state):
        return state
    flat = [name for group in names for name in group]
    named = [{**group, PARAMS: [flat[number] for number in group[PARAMS]]} for group in state[GROUPS]]
    inner = {flat[key] if type(key) is int else key: value for key, value in state[STATE].items()}
    return {**state, STATE: inner, GROUPS: named}


def by_number(state: Any, names: Sequence[Sequence[str]]) -> Any:  # noqa: ANN401
    """Reverses `by_name`. names: the current optimizer's, by group. Raises StateError if its parameters differ."""
    if not _is_standard(state):
        return state
    if [sorted(group[PARAMS]) for group in state[GROUPS]] != [sorted(group) for group in names]:
        raise StateError("its optimizer has different parameters or parameter groups")
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    pairs = zip(state[GROUPS], names, strict=True)
    numbered = [{**saved, PARAMS: [numbers[name] for name in group]} for saved, group in pairs]
    inner = {numbers.get(key, key): value for key, value in state[STATE].items()}
    return {**state, STATE: inner, GROUPS: numbered}


def load(optimizer: torch.optim.Optimizer, saved: Any, names: Sequence[Sequence[str]]) -> None:  # noqa: ANN401
    """Sets an optimizer's state. saved: a result of `by_name`. names: the result of `groups` for the current
    optimizer."""
    optimizer.load_state_dict(by_number(saved, names))
    if not _is_standard(saved):
        return
    # load_state_dict converts state to the parameter's type, which would round float32 master weights and moments.
    flat = (name for group in names for name in group)
    for parameter, name in zip(parameters(optimizer), flat, strict=True):
        now = optimizer.state.get(parameter, {})
        for key, value in saved[STATE].get(name, {}).items():
            converted = isinstance(value, torch.Tensor) and isinstance(now.get(key), torch.Tensor) and key != "step"
            if converted and now[key].dtype != value.dtype:
                now[key] = value.to(now[key].device)


def _is_standard(state: Any) -> bool:  # noqa: ANN401
    """Returns whether a state_dict has the structure that torch optimizers use."""
    if not isinstance(state, dict) or not isinstance(state.get(STATE), dict) or not isinstance(state.get(GROUPS), list):
        return False
    return all(isinstance(group, dict) and isinstance(group.get(PARAMS), list) for group in state[GROUPS])
