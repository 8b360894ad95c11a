"""A model's tensors that change in training but are not shared. An export contains their initial values.

Unshared tensors are the running averages of BatchNorm and similar layers, recognised by name, and tensors that the
first learner listed. The learner's list is in the metadata of the initial parameters' file and of each export.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from pathlib import Path

LISTED = "atoll.initial"  # key in the metadata; the value is a JSON list of names
AVERAGES = ("running_mean", "running_var", "num_batches_tracked")  # as torch names them
MAX_SHOWN = 80  # number of characters of a name that the warning shows
REMEDY = "torch.optim.swa_utils.update_bn(loader, model)"


def unshared(names: Collection[str], trained: Collection[str], metadata: Mapping[str, str]) -> list[str]:
    """Returns the names of a file's unshared tensors.

    names, metadata: from the file. trained: names of trained tensors.
    """
    told = set(listed(metadata))
    return sorted(
        name for name in names if name not in trained and (name in told or name.rpartition(".")[2] in AVERAGES)
    )


def warning(names: Collection[str]) -> str:
    """Returns the warning about an export with these unshared tensors, or an empty string if there are none."""
    if not names:
        return ""
    first = json.dumps(min(names)[:MAX_SHOWN])
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"the file has only initial values for {first}{others}, since learners do not share these values. The model "
        f"may be useless with initial values: recompute BatchNorm averages with {REMEDY}"
    )


def warning_of(export: Path) -> str:
    """Returns the warning about the unshared tensors in an exported file, or an empty string if there are none."""
    with export.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return warning(listed(header.get("__metadata__", {})))


def listed(metadata: object) -> list[str]:
    """Returns the names that a file's metadata lists, or no names if the list is invalid.

    The list comes from a learner, so it can be invalid.
    """
    if not isinstance(metadata, Mapping):
        return []
    try:
        names = json.loads(metadata.get(LISTED, "[]"))
    except (ValueError, TypeError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
