"""Copies a state at a step boundary, so that a background thread can write it while training changes the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from atoll.checkpoints.nested_state import Apart
from atoll.ranks.tensor_part import TensorPart


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a tensor that this rank writes or reads. values: the part as a plain tensor."""

    part: TensorPart
    values: torch.Tensor


@dataclass(slots=True)
class Staged:
    """A copy of a state. tensors: the tensors by key, in host memory. objects: the rest of each nested state, by
    name."""

    tensors: dict[str, HeldPart] = field(default_factory=dict)
    objects: dict[str, Apart] = field(default_factory=dict)


class Staging:
    """Copies states one after another and reuses the memory of earlier copies."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, HeldPart]) -> dict[str, HeldPart]:
        """Returns copies in host memory. Waits for the device."""
        kept, self._memory = self._memory, {}  # empty until `returned`, because a background thread reads the memory
        sources = {key: held.values.detach() for key, held in tensors.items()}
        copies = {key: _memory(source, kept.pop(key, None)) for key, source in sources.items()}
        kept.clear()
        with torch.no_grad():
            for key, source in sources.items():
                copies[key].copy_(source, non_blocking=source.is_cuda)
        for device in {source.device for source in sources.values() if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return {key: HeldPart(held.part, copies[key]) for key, held in tensors.items()}

    def returned(self, tensors: Mapping[str, HeldPart]) -> None:
        """Takes back the memory of a copy that is no longer read."""
        self._memory = {key: held.values for key, held in tensors.items()}


def _memory(source: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Returns contiguous host memory for a tensor: the old memory if it fits."""
    if old is not None and old.shape == source.shape and old.dtype == source.dtype:
        return old
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
