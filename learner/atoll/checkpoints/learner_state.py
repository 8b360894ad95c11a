"""Collects the state of one rank for a checkpoint at a step boundary, and applies it after a restart.

Keys of tensors: model.NAME, copies.NAME.NUMBER (copies that the user named), optimizer.NUMBER.PATH, extra.NAME.PATH.
A tensor under such a key belongs to all ranks: each rank has a part of it, or all ranks have the same values. A rank's
own tensors are under rank.NUMBER.KEY. Optimizers' state is keyed by parameter names, so that the order of parameters
may change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import structlog
import torch

from atoll.checkpoints import optimizer_names as optimizers
from atoll.checkpoints.directory import Facts
from atoll.checkpoints.nested_state import Apart, Path, StateError, at, equal, first_line, join, take_apart
from atoll.checkpoints.staging import HeldPart, Staged, Staging
from atoll.dtensors import is_dtensor
from atoll.errors import LearnerError
from atoll.model.parameters import Parameters
from atoll.ranks.placements import local_tensor, part_of

if TYPE_CHECKING:  # slow to import
    from torch.distributed.tensor import DTensor

    from atoll.checkpoints.storage import SavedTensors

log = structlog.get_logger()

Like: TypeAlias = Callable[[Path], object]  # a function that returns the current value at a path


class HasState(Protocol):
    """An object whose state can be saved, such as a scheduler or a data loader."""

    def state_dict(self) -> Any:  # noqa: ANN401
        """Returns the state: tensors and plain values, possibly nested."""

    def load_state_dict(self, state_dict: Any, /) -> Any:  # noqa: ANN401
        """Sets the state."""


@dataclass(slots=True)
class Restored:
    """The values read from a checkpoint. unused: the reason why extra state is not restored, by name."""

    model: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)


class LearnerState:
    """One rank's state. extra: the user's objects by name. rank: number of this rank. ranks: number of ranks."""

    def __init__(self, parameters: Parameters, extra: Mapping[str, HasState], rank: int, ranks: int) -> None:
        self._parameters = parameters
        self._extra = extra
        self._rank, self._ranks = rank, ranks
        self._names = [tensor.name for tensor in parameters.tensors]
        self.staging = Staging()

    # ------------------------------------------------------------------------------ saving

    def stage(self) -> Staged:
        """Returns a copy of the state. Makes no collective calls. Raises StateError if the state cannot be copied."""
        self._parameters.reshard()
        held = self._of_model() | {f"copies.{key}": each for key, each in self._named_copies().items()}
        tensors: dict[str, torch.Tensor] = {}
        objects = {}
        for number, optimizer in enumerate(self._parameters.optimizers):
            like = self._like_of(optimizer)
            what, name = f"optimizer {number}: state_dict()", f"optimizer.{number}"
            state = optimizers.by_name(_state(what, optimizer), self._groups(optimizer))
            objects[self._mine(name)] = take_apart(what, state, self._key_of(name, like), tensors)
        for name, each in self._extra.items():
            what, key_of = f'extra_state["{name}"].state_dict()', self._key_of(f"extra.{name}", lambda _: None)
            objects[self._mine(f"extra.{name}")] = take_apart(what, _state(what, each), key_of, tensors)
        held |= {key: _held(key, tensor) for key, tensor in tensors.items()}
        return Staged(self.staging.copy(held), objects)

    def kinds(self) -> list[str]:
        """Returns the class of each optimizer."""
        return [type(optimizer).__name__ for optimizer in self._parameters.optimizers]

    def copies(self) -> list[tuple[int, str]]:
        """Returns (number of the optimizer, state key) of the copies in the optimizers' state."""
        return self._parameters.copies.found()

    def _of_model(self) -> dict[str, HeldPart]:
        rows = zip(self._names, self._parameters.values, self._parameters.parts, strict=True)
        held = {f"model.{name}": HeldPart(part, local_tensor(value)) for name, value, part in rows}
        buffers = {id(buffer) for buffer in self._parameters.model.buffers()}
        for name, value in self._parameters.not_shared().items():
            if not self._rank or is_dtensor(value) or id(value) not in buffers:  # ranks' buffers may differ
                held[f"model.{name}"] = _held(name, value)
        return held

    def _key_of(self, name: str, like: Like) -> Callable[[Path, torch.Tensor], str]:
        """Returns a function that names tensors. like: a function that returns a tensor's parameter, or None."""

        def key(path: Path, tensor: torch.Tensor) -> str:
            inside = ".".join(map(str, (name, *path)))
            owner = like(path)
            whole = is_dtensor(tensor) or (owner is not None and not is_dtensor(owner))
            return inside if whole else self._mine(inside)

        return key

    def _mine(self, name: str) -> str:
        return f"rank.{self._rank}.{name}"

    # ------------------------------------------------------------------------------ restoring

    def read(self, saved: SavedTensors, facts: Facts) -> Restored:
        """Reads the values that this rank needs. Raises StateError if they do not fit the model or its optimizers."""
        saved.open()
        reading, restored = _Reading(saved), Restored()
        self._read_model(reading, restored, facts)
        if facts.optimizers != self.kinds():
            saved_kinds, kinds = (", ".join(each) or "no optimizer" for each in (facts.optimizers, self.kinds()))
            raise StateError(f"it was saved with {saved_kinds}, but this learner has {kinds}")
        of_optimizers, of_extra = [], {}
        for number, optimizer in enumerate(self._parameters.optimizers):
            apart, reason = self._apart(saved, f"optimizer.{number}", facts.ranks)
            if apart is None:
                raise StateError(f"the state of optimizer {number} {reason}")
            optimizers.by_number(apart.state, self._groups(optimizer))  # raises StateError if the parameters differ
            of_optimizers.append((apart, reading.of(apart, self._like_of(optimizer), own_too=False)))
        for name, each in self._extra.items():
            apart, reason = self._apart(saved, f"extra.{name}", facts.ranks)
            if apart is None:
                restored.unused[name] = reason
                continue
            of_extra[name] = apart, reading.of(apart, self._like_present(each, apart, saved), own_too=True)
        saved.read(reading.wanted)
        restored.optimizers = [join(apart, tensors) for apart, tensors in of_optimizers]
        restored.extra = {name: join(apart, tensors) for name, (apart, tensors) in of_extra.items()}
        return restored

    def _like_present(self, each: HasState, apart: Apart, saved: SavedTensors) -> Like:
        """Returns a function that returns the current value, such as a DTensor, at a path in a user's object. Calls
        state_dict() only if the object may contain DTensors, because this call starts some data loaders' workers.
        """
        is_sharded = any(is_dtensor(value) for value in self._parameters.values)
        if is_sharded and any(saved.dtype(key).is_floating_point for _, key in apart.tensors):
            return partial(at, each.state_dict())
        return lambda _: None

    def _read_model(self, reading: _Reading, restored: Restored, facts: Facts) -> None:
        """Requests the tensors of the model. Trainable parameters are needed only to update their copies."""
        described, named = reading.saved.described, self._named_copies()
        for name, value in zip(self._names, self._parameters.values, strict=True):
            shape, _ = described.get(f"model.{name}", (None, None))
            if shape != tuple(value.shape):
                raise StateError(f'it lacks "{name}", or has it with a different shape')
            if named or facts.copies:
                restored.model[name] = reading.want(f"model.{name}", value)
        for name, other in self._parameters.not_shared().items():
            shape, _ = described.get(f"model.{name}", (None, None))
            if shape == tuple(other.shape):
                restored.model[name] = reading.want(f"model.{name}", other)
        for name, held in named.items():
            key = f"copies.{name}"
            if described.get(key, (None, None))[0] == held.part.shape:
                restored.copies[name] = reading.want_part(key, held)

    def _apart(self, saved: SavedTensors, name: str, ranks: int) -> tuple[Apart | None, str]:
        """Returns this rank's nested state, or None and the reason. ranks: number of ranks in the checkpoint."""
        if f"objects.rank.0.{name}" not in saved.described:
            return None, "is not in the checkpoint"
        if ranks == self._ranks:
            return saved.read_object(self._mine(name)), ""
        first = saved.read_object(f"rank.0.{name}")
        for rank in range(1, ranks):
            if not _same(saved, first, saved.read_object(f"rank.{rank}.{name}"), rank):
                return None, f"differs between ranks, and the checkpoint has {ranks} ranks, not {self._ranks}"
        return first, ""

    def apply(self, restored: Restored, facts: Facts) -> None:
        """Sets the optimizers' state, extra state and local values. The trainable parameters keep their values.

        A saved copy of a parameter matches the parameter's saved value. The difference between the parameter's current
        and saved values is therefore added to the copy. Raises LearnerError.
        """
        self._parameters.reshard()
        values, copies = self._parameters.values, self._parameters.copies
        self._apply_not_shared(restored)
        for number, optimizer in enumerate(self._parameters.optimizers):
            try:
                optimizers.load(optimizer, restored.optimizers[number], self._groups(optimizer))
            except Exception as error:
                raise LearnerError(_not_loaded(f"optimizer {number}", error)) from error
        for name, each in self._extra.items():
            if reason := restored.unused.get(name):
                log.warning("this extra state is not restored", name=name, reason=f"it {reason}")
                continue
            try:
                each.load_state_dict(restored.extra[name])
            except Exception as error:
                raise LearnerError(_not_loaded(f'extra_state["{name}"]', error)) from error
        with torch.no_grad():
            for key, held in self._named_copies().items():
                if key in restored.copies:
                    held.values.copy_(restored.copies[key])
        copies.told(facts.copies)
        if not all(name in restored.model for name in self._names):
            return
        local = [local_tensor(value) for value in values]
        present = [each.clone() for each in local]
        with torch.no_grad():
            for mine, name in zip(local, self._names, strict=True):
                mine.copy_(local_tensor(restored.model[name]))
            with copies.following(values):
                for mine, now in zip(local, present, strict=True):
                    mine.copy_(now)

    def _apply_not_shared(self, restored: Restored) -> None:
        missing = []
        for name, value in self._parameters.not_shared().items():
            if name in restored.model:
                local_tensor(value).copy_(local_tensor(restored.model[name]))
            else:
                missing.append(name)
        if missing:
            log.warning(
                "some buffers or unshared parameters are not in the checkpoint, or have a different shape there: "
                "they keep their current values",
                first=missing[0],
                count=len(missing),
            )

    # ------------------------------------------------------------------------------ saving and restoring

    def _named_copies(self) -> dict[str, HeldPart]:
        """Returns the copies that the user named, by NAME.NUMBER. A copy holds the same part as its parameter."""
        pairs, numbers = list(self._parameters.copies.named()), Counter[str]()
        found = {}
        for name, (owner, copy) in zip(self._parameters.names_of([owner for owner, _ in pairs]), pairs, strict=True):
            if name:
                found[f"{name}.{numbers[name]}"] = HeldPart(part_of(name, owner), local_tensor(copy))
                numbers[name] += 1
        return found

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Returns the names of the parameters in each of an optimizer's groups."""
        return optimizers.groups(optimizer, self._parameters.names_of(optimizers.parameters(optimizer)))

    def _like_of(self, optimizer: torch.optim.Optimizer) -> Like:
        """Returns a function that returns the parameter whose state is at a path, or None."""
        names = (name for group in self._groups(optimizer) for name in group)
        owners = dict(zip(names, optimizers.parameters(optimizer), strict=True))
        return lambda path: owners.get(path[1]) if path[0] == optimizers.STATE and len(path) > 1 else None


class _Reading:
    """The parts of a checkpoint that this rank needs. They are collected first and then read in one call."""

    def __init__(self, saved: SavedTensors) -> None:
        self.saved = saved
        self.wanted: dict[str, HeldPart] = {}

    def of(self, apart: Apart, like: Like, *, own_too: bool) -> dict[str, torch.Tensor]:
        """Returns the tensors of a nested state by key. Their values are not read yet.

        own_too: whether separate tensors of the ranks may become parts of one tensor.
        """
        found = {}
        for path, key in apart.tensors:
            present = like(path) if own_too or not key.startswith("rank.") else None
            found[key] = self.want(key, present)
        return found

    def want(self, key: str, like: object) -> torch.Tensor:
        """Returns a tensor whose values are not read yet. If `like` is a DTensor, the result has its placements, or is
        replicated if the shapes differ. Otherwise, the result is a whole tensor in host memory."""
        if key not in self.saved.described:
            raise StateError(f'it lacks "{key}"')
        shape, dtype = self.saved.described[key]
        made = torch.empty(shape, dtype=dtype) if not is_dtensor(like) else _placed(like, shape, dtype)
        self.wanted[key] = _held(key, made)
        return made

    def want_part(self, key: str, held: HeldPart) -> torch.Tensor:
        """Returns a part in host memory, whose values are not read yet. held: the part to read."""
        _, dtype = self.saved.described[key]
        made = torch.empty(held.part.local_shape, dtype=dtype)
        self.wanted[key] = HeldPart(held.part, made)
        return made


def _placed(like: DTensor, shape: tuple[int, ...], dtype: torch.dtype) -> DTensor:
    """Returns an empty DTensor on the mesh of `like`."""
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 - imported already, as `like` exists

    if tuple(like.shape) == shape:
        made = torch.empty_like(like, dtype=dtype, requires_grad=False)
        assert is_dtensor(made), "empty_like keeps the type"
        return made
    mesh = like.device_mesh
    local = torch.empty(shape, dtype=dtype, device=local_tensor(like).device)
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _held(name: str, tensor: torch.Tensor) -> HeldPart:
    return HeldPart(part_of(name, tensor), local_tensor(tensor))


def _same(saved: SavedTensors, first: Apart, other: Apart, rank: int) -> bool:
    """Returns whether the nested state of rank 0 and that of another rank are equal."""
    if not equal(first.state, other.state) or len(first.tensors) != len(other.tensors):
        return False
    for (path, key), (other_path, other_key) in zip(first.tensors, other.tensors, strict=True):
        if path != other_path or key.removeprefix("rank.0.") != other_key.removeprefix(f"rank.{rank}."):
            return False
        if key != other_key and not equal(saved.read_whole(key), saved.read_whole(other_key)):
            return False
    return True


def _state(what: str, each: HasState) -> Any:  # noqa: ANN401
    """Returns an object's state. what: the method's name in messages. Raises StateError if the method raises."""
    try:
        return each.state_dict()
    except Exception as error:
        raise StateError(f"{what} raised {type(error).__name__} ({first_line(error)}): correct this method") from error


def _not_loaded(what: str, error: Exception) -> str:
    return (
        f"{what} could not load its state from a checkpoint ({type(error).__name__}: {error}): correct its "
        "load_state_dict, or move the checkpoint away to start without it"
    )
