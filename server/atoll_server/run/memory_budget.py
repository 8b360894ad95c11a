"""How much memory a model takes in a core, and how much this process may have."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# State, and published updates; a fragment that is read while it is merged; see docs/data-plane.md.
A_PARAMETER_BYTES = 12.4
ELSEWHERE_BYTES = 600 << 20  # the interpreter with its compiler, and what is on its way from and to learners
CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def needed_bytes(parameters: float) -> int:
    """At a model's busiest."""
    return int(A_PARAMETER_BYTES * parameters) + ELSEWHERE_BYTES


def parameters_of(tensors: Iterable[Mapping[str, Any]]) -> int:
    """Of tensors as the ledger has them."""
    return sum(math.prod(tensor["shape"]) for tensor in tensors)


def machine_bytes() -> int:
    """What the machine has, or the container allows."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUPS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # the other kind of control group, or none
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def too_much(parameters: int, memory_bytes: int | None) -> str:
    """Why a model cannot be held, with the remedy; empty when it can. memory_bytes: None: what there is."""
    needed, given = needed_bytes(parameters), memory_bytes or machine_bytes()
    if needed <= given or not parameters:
        return ""
    where = "--memory-gib gives" if memory_bytes else "this machine has"
    return (
        f"the model has {parameters} trainable parameters: its core needs {needed / 2**30:.1f} GiB of memory, "
        f"{where} {given / 2**30:.1f}; use a larger machine, or train fewer of them"
    )
