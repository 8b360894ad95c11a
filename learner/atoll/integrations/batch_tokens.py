"""Counts the tokens in the batches of trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch

from atoll.errors import LearnerError

IGNORED = -100  # label of positions without a loss, in torch and in Hugging Face's libraries
CountTokens: TypeAlias = Callable[[Any], int | torch.Tensor]


def count_tokens(batch: object) -> int | torch.Tensor:
    """Returns the number of tokens in a batch.

    For a mapping, this is the sum of its 2-dimensional `attention_mask`. Without a mask, it is the number of `labels`
    other than -100, and without labels, the number of `input_ids`. For a sequence, the last item counts as labels if it
    is a tensor of integers. Otherwise, the first item counts as token IDs. For a tensor of integers, each element is
    one token.

    Args:
        batch: A mapping or sequence of tensors, or a tensor.

    Returns:
        The number of tokens. A count from a mask or labels is a tensor, so that counting does not wait for a device.

    Raises:
        LearnerError: If the batch has no such tensor.

    Example:
        ```python
        tokens = count_tokens({"input_ids": ids, "attention_mask": mask})
        ```
    """
    found: int | torch.Tensor | None = None
    if isinstance(batch, torch.Tensor):
        found = batch.numel() if _is_whole(batch) else None
    elif isinstance(batch, Mapping):
        found = _of_mapping(batch)
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        last, first = batch[-1], batch[0]
        found = _labelled(last) if _is_whole(last) else (first.numel() if _is_whole(first) else None)
    if found is None:
        raise LearnerError(
            f"cannot count the tokens of a batch of type {type(batch).__name__}, which has no tensor of token IDs, "
            "labels or attention_mask: pass tokens=, a function that counts them"
        )
    return found


def _of_mapping(batch: Mapping[Any, Any]) -> int | torch.Tensor | None:
    mask, labels, ids = (batch.get(name) for name in ("attention_mask", "labels", "input_ids"))
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return mask.sum()
    if _is_whole(labels):
        return _labelled(labels)
    return ids.numel() if _is_whole(ids) else None


def _labelled(labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum()


def _is_whole(value: object) -> TypeGuard[torch.Tensor]:
    """Returns whether a value is a tensor of integers."""
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


class TokenCounter:
    """Adds up the tokens of an optimizer step's micro-batches. count: counts one batch; None for `count_tokens`."""

    def __init__(self, count: CountTokens | None) -> None:
        self._count = count or count_tokens
        self._found: list[int | torch.Tensor] = []

    def add(self, batch: object) -> None:
        """Counts a micro-batch. Raises LearnerError if its tokens cannot be counted."""
        self._found.append(self._count(batch))

    def take(self) -> int:
        """Returns the number of tokens since the last call. Waits for the device if a batch is on one."""
        found, self._found = self._found, []
        return sum(int(each) for each in found)
