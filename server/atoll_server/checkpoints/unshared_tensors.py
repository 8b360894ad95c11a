"""Tensors of a model that change in training but are not shared. An export has their values from the run's start.

They are the averages of BatchNorm and similar layers, recognised by their names, and tensors that the first learner
listed. The list is in the metadata of the first parameters' file and of exports.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

LISTED = "atoll.initial"  # the metadata's key; a JSON list of names
AVERAGES = ("running_mean", "running_var", "num_batches_tracked")  # as torch names them
MAX_SHOWN = 80  # characters of a name that are shown
REMEDY = "torch.optim.swa_utils.update_bn(loader, model)"


def unshared(names: Collection[str], trained: Collection[str], metadata: Mapping[str, str]) -> list[str]:
    """Names of a file's unshared tensors. names, metadata: the file's. trained: names of trained tensors."""
    told = set(listed(metadata))
    return sorted(
        name for name in names if name not in trained and (name in told or name.rpartition(".")[2] in AVERAGES)
    )


def warning(names: Collection[str]) -> str:
    """The warning about an export with these unshared tensors; empty if there are none."""
    if not names:
        return ""
    first = json.dumps(min(names)[:MAX_SHOWN])
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{first}{others}: not shared in training, so the file has the values from the run's start. The model may be "
        f"useless with these values: recompute averages of BatchNorm with {REMEDY}"
    )


def warning_of(export: Path) -> str:
    """The warning about an exported file."""
    with export.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return warning(listed(header.get("__metadata__", {})))


def listed(metadata: object) -> list[str]:
    """The names in a file's metadata; empty without a valid list, since a learner wrote the metadata."""
    if not isinstance(metadata, Mapping):
        return []
    try:
        names = json.loads(metadata.get(LISTED, "[]"))
    except (ValueError, TypeError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
