"""The state of a learner that a checkpoint holds: collects it at a step boundary, and applies it after a restart.

Keys: model.NAME, copies.NAME.NUMBER (copies that the user named), optimizer.NUMBER, and extra.RANK.NAME. Optimizers'
state is keyed by parameter names, so that their order may change. Extra state may differ among ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import structlog
import torch

from atoll.boundary.parameters import Parameters
from atoll.checkpoints.directory import Facts
from atoll.checkpoints.staging import OBJECTS, Staged, Staging, StateError, joined
from atoll.errors import LearnerError

log = structlog.get_logger()

STATE, GROUPS, PARAMS = "state", "param_groups", "params"  # keys of torch.optim.Optimizer.state_dict()


class HasState(Protocol):
    """An object whose state can be saved, such as a scheduler or a data loader."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Returns the state: tensors and plain values, possibly nested."""

    def load_state_dict(self, state_dict: Any, /) -> Any:  # noqa: ANN401
        """Sets the state."""


class LearnerState:
    """One rank's state. extra: the user's objects by name. rank, ranks: number of this rank, and of all ranks."""

    def __init__(self, parameters: Parameters, extra: Mapping[str, HasState], rank: int, ranks: int) -> None:
        self._parameters = parameters
        self._extra = extra
        self._rank, self._ranks = rank, ranks
        self._names = [tensor.name for tensor in parameters.tensors]
        self._staging = Staging()

    # ------------------------------------------------------------------------------ saving

    def stage(self) -> Staged:
        """Returns a copy of the state. The next call overwrites it. Raises the errors of users' objects."""
        values = zip(self._names, self._parameters.values, strict=True)
        model = {f"model.{name}": value for name, value in (*values, *self._parameters.not_shared().items())}
        nested: dict[str, object] = {
            f"extra.{self._rank}.{name}": each.state_dict() for name, each in self._extra.items()
        }
        optimizers = self._parameters.optimizers
        for number, optimizer in enumerate(optimizers):
            nested[f"optimizer.{number}"] = _by_name(optimizer.state_dict(), self._groups(optimizer))
        staged = self._staging.copy(model | dict(self._named_copies()), nested)
        if self._rank:  # the other objects are equal on all ranks, but their bytes may differ
            staged.objects = {key: value for key, value in staged.objects.items() if key.startswith("extra.")}
        return staged

    def copies(self) -> list[tuple[str, str]]:
        """Returns (parameter, state key) of each copy in the optimizers' state."""
        names = {id(value): name for name, value in zip(self._names, self._parameters.values, strict=True)}
        found = self._parameters.copies.found(self._parameters.values)
        return sorted((names[parameter], key) for parameter, key in found if parameter in names)

    # ------------------------------------------------------------------------------ restoring

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Returns why a checkpoint cannot be applied to this model and these optimizers, or ""."""
        for name, value in zip(self._names, self._parameters.values, strict=True):
            if f"model.{name}" not in tensors or tensors[f"model.{name}"].shape != value.shape:
                return f'it lacks "{name}", or has it with another shape'
        numbers = [key for key in tensors if key.startswith(f"{OBJECTS}optimizer.")]
        optimizers = self._parameters.optimizers
        if len(numbers) != len(optimizers):
            return f"it has {len(numbers)} optimizers, and this learner has {len(optimizers)}"
        try:
            for number, optimizer in enumerate(optimizers):
                _by_number(self._nested(f"optimizer.{number}", tensors), self._groups(optimizer))
        except StateError as error:
            return str(error)
        return ""

    def apply(self, tensors: Mapping[str, torch.Tensor], facts: Facts) -> None:
        """Sets the optimizers' state, extra state and local values. The trainable parameters keep their values.

        Copies of the parameters were saved with the checkpoint's parameters. They therefore move by the same change as
        the parameters, from the checkpoint's to the present values. Raises LearnerError.
        """
        values, copies = self._parameters.values, self._parameters.copies
        present = [value.detach().clone() for value in values]
        with torch.no_grad():
            for name, value in zip(self._names, values, strict=True):
                value.copy_(tensors[f"model.{name}"])
        self._apply_not_shared(tensors)
        for number, optimizer in enumerate(self._parameters.optimizers):
            self._load(number, optimizer, self._nested(f"optimizer.{number}", tensors))
        self._load_extra(tensors, facts)
        with torch.no_grad():
            for key, copy in self._named_copies():
                if key in tensors and tensors[key].shape == copy.shape:
                    copy.copy_(tensors[key])
        ids = {name: id(value) for name, value in zip(self._names, values, strict=True)}
        copies.told(values, {(ids[name], key) for name, key in facts.copies if name in ids})
        with copies.following(values), torch.no_grad():
            for value, now in zip(values, present, strict=True):
                value.copy_(now)

    def _apply_not_shared(self, tensors: Mapping[str, torch.Tensor]) -> None:
        missing = []
        with torch.no_grad():
            for name, value in self._parameters.not_shared().items():
                saved = tensors.get(f"model.{name}")
                if saved is None or saved.shape != value.shape:
                    missing.append(name)
                else:
                    value.copy_(saved)
        if missing:
            log.warning(
                "the checkpoint lacks some buffers or unshared parameters", first=missing[0], count=len(missing)
            )

    def _load(self, number: int, optimizer: torch.optim.Optimizer, saved: Any) -> None:  # noqa: ANN401
        groups = self._groups(optimizer)
        try:
            optimizer.load_state_dict(_by_number(saved, groups))
        except Exception as error:
            raise LearnerError(_not_loaded(f"optimizer {number}", error)) from error
        if not _is_standard(saved):
            return
        # load_state_dict converts state to the parameter's type, which would round float32 masters and moments.
        names = (name for group in groups for name in group)
        for parameter, name in zip(_parameters(optimizer), names, strict=True):
            now = optimizer.state.get(parameter, {})
            for key, value in saved[STATE].get(name, {}).items():
                converted = isinstance(value, torch.Tensor) and isinstance(now.get(key), torch.Tensor) and key != "step"
                if converted and now[key].dtype != value.dtype:
                    now[key] = value.to(now[key].device)

    def _load_extra(self, tensors: Mapping[str, torch.Tensor], facts: Facts) -> None:
        for name, each in self._extra.items():
            try:
                same, state = self._extra_of(name, tensors, facts.ranks)
                if same:
                    each.load_state_dict(state)
                else:
                    log.warning("this extra state is not restored", name=name, reason=state)
            except Exception as error:
                raise LearnerError(_not_loaded(f'extra_state["{name}"]', error)) from error

    def _extra_of(self, name: str, tensors: Mapping[str, torch.Tensor], ranks: int) -> tuple[bool, Any]:
        """Returns (True, this rank's state), or (False, the reason why there is none)."""
        if f"{OBJECTS}extra.{self._rank if ranks == self._ranks else 0}.{name}" not in tensors:
            return False, "the checkpoint does not have it"
        if ranks == self._ranks:
            return True, self._nested(f"extra.{self._rank}.{name}", tensors)
        states = [self._nested(f"extra.{rank}.{name}", tensors) for rank in range(ranks)]
        if all(_equal(states[0], other) for other in states[1:]):
            return True, states[0]
        return False, f"it differs by rank, and the checkpoint has {ranks} ranks instead of {self._ranks}"

    # ------------------------------------------------------------------------------ both

    def _nested(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401
        if OBJECTS + key not in tensors:
            raise StateError(f'it lacks "{key}"')
        return joined(key, tensors[OBJECTS + key], tensors)

    def _named_copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        pairs, numbers = list(self._parameters.copies.named()), Counter[str]()
        for name, (_, copy) in zip(self._parameters.names_of([owner for owner, _ in pairs]), pairs, strict=True):
            if name:
                yield f"copies.{name}.{numbers[name]}", copy
                numbers[name] += 1

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Returns the names of the parameters in each of an optimizer's groups."""
        flat = self._parameters.names_of(_parameters(optimizer))
        if len(set(flat)) < len(flat):  # it has a copy next to its parameter
            flat = [str(number) for number in range(len(flat))]
        left = iter(flat)
        return [list(islice(left, len(group[PARAMS]))) for group in optimizer.param_groups]


def _not_loaded(what: str, error: Exception) -> str:
    return (
        f"{what} could not load its state from a checkpoint ({type(error).__name__}: {error}): correct its "
        "load_state_dict, or move the checkpoint away to start without it"
    )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group[PARAMS]]


def _is_standard(state: Any) -> bool:  # noqa: ANN401
    """Returns whether an optimizer's state_dict has the form of torch's."""
    if not isinstance(state, dict) or not isinstance(state.get(STATE), dict) or not isinstance(state.get(GROUPS), list):
        return False
    return all(isinstance(group, dict) and isinstance(group.get(PARAMS), list) for group in state[GROUPS])


def _by_name(state: Any, groups: Sequence[Sequence[str]]) -> Any:  # noqa: ANN401
    """Returns an optimizer's state_dict with names in place of its numbers of parameters."""
    if not _is_standard(state):
        return state
    names = [name for group in groups for name in group]
    named = [{**group, PARAMS: [names[number] for number in group[PARAMS]]} for group in state[GROUPS]]
    inner = {names[key] if type(key) is int else key: value for key, value in state[STATE].items()}
    return {**state, STATE: inner, GROUPS: named}


def _by_number(state: Any, groups: Sequence[Sequence[str]]) -> Any:  # noqa: ANN401
    """Reverses `_by_name`. groups: of the present optimizer. Raises StateError if its parameters are others."""
    if not _is_standard(state):
        return state
    if [sorted(group[PARAMS]) for group in state[GROUPS]] != [sorted(group) for group in groups]:
        raise StateError("its optimizer has other parameters, or other groups of them")
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    pairs = zip(state[GROUPS], groups, strict=True)
    numbered = [{**saved, PARAMS: [numbers[name] for name in group]} for saved, group in pairs]
    inner = {numbers.get(key, key): value for key, value in state[STATE].items()}
    return {**state, STATE: inner, GROUPS: numbered}


def _equal(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Returns whether two nested states are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
