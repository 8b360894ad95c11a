"""A model's tensors that learners do not share, as the metadata of the initial parameters and of each export list them.

- Unshared tensors change in training. An export contains their initial values. They are the running averages of
  BatchNorm and similar layers, recognised by name, and the tensors that the first learner listed.
- Buffers may change in training. An export contains their initial values.
- Frozen parameters are the same on all learners. If the first learner did not send them, an export lacks them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from atoll_wire.model_file.metadata_keys import BUFFERS, FROZEN, LISTED

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
    return (
        f"the file has only initial values for {_shown(names)}, since learners do not share these values. The model "
        f"may be useless with initial values: recompute BatchNorm averages with {REMEDY}"
    )


def missing_warning(names: Collection[str]) -> str:
    """Returns the warning about an export that lacks these frozen parameters, or an empty string if there are none."""
    if not names:
        return ""
    return (
        f"the file lacks {_shown(names)}, since the first learner did not send frozen parameters: load the base model, "
        "and then this file with load_state_dict(strict=False)"
    )


def metadata_lists(names: Collection[str], trained: Collection[str], metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the lists of names in the metadata of an export.

    names, metadata: from the file of the initial parameters. trained: names of trained tensors.
    """
    lists = {
        LISTED: unshared(names, trained, metadata),
        BUFFERS: sorted(set(listed(metadata, BUFFERS)) & set(names) - set(trained)),
        FROZEN: sorted(set(listed(metadata, FROZEN)) - set(names) - set(trained)),
    }
    return {key: json.dumps(found) for key, found in lists.items() if found}


def _shown(names: Collection[str]) -> str:
    """Returns the first name, shortened, and the number of the others."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return json.dumps(min(names)[:MAX_SHOWN]) + others


def listed(metadata: object, key: str = LISTED) -> list[str]:
    """Returns the names that a file's metadata lists under a key, or no names if the list is invalid.

    The list comes from a learner, so it can be invalid.
    """
    if not isinstance(metadata, Mapping):
        return []
    try:
        names = json.loads(metadata.get(key, "[]"))
    except (ValueError, TypeError, RecursionError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
