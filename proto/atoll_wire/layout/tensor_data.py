"""The trainable tensors of a model as JSON values, as the ledger and the fixed values of a run contain them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from atoll_wire.layout.layout import MergeKind, TensorSpec


def tensors_as_data(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """Returns tensors as JSON values, from which `tensors_from_data` reads them."""
    return [
        {
            "name": t.name,
            "shape": list(t.shape),
            "dtype": t.dtype,
            "kind": t.kind.value,
            "tied_names": list(t.tied_names),
        }
        for t in tensors
    ]


def tensors_from_data(data: Iterable[Mapping[str, Any]]) -> list[TensorSpec]:
    """Returns the tensors that JSON values describe. Raises KeyError, TypeError or ValueError for other values."""
    return [
        TensorSpec(t["name"], tuple(t["shape"]), t["dtype"], MergeKind(t["kind"]), tuple(t["tied_names"])) for t in data
    ]
