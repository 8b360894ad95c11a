"""Computes the memory that a core needs for a model and the memory that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Bytes per parameter for state, cached updates and a copy of a fragment that is read during its merge
A_PARAMETER_BYTES = 12.4
ELSEWHERE_BYTES = 600 << 20  # the interpreter, the kernel compiler, and data in transit to and from learners
CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def needed_bytes(parameters: float) -> int:
    """Returns an estimate of a core's peak memory in bytes, for a model with this number of trainable parameters."""
    return int(A_PARAMETER_BYTES * parameters) + ELSEWHERE_BYTES


def parameters_of(meta: Mapping[str, Any]) -> int:
    """Returns the number of parameters that this process holds; 0 before the run has any. meta: the run's values."""
    if "owned_parameters" in meta:
        return int(meta["owned_parameters"])
    return sum(math.prod(tensor["shape"]) for tensor in meta.get("tensors", ()))


def machine_bytes() -> int:
    """Returns the machine's memory in bytes, or the container's limit if that is lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CGROUPS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue  # this machine uses the other cgroup version, or no cgroups
        if text.isdecimal():
            limits.append(int(text))
    return min(limits)


def too_much(parameters: int, memory_bytes: int | None) -> str:
    """Returns the reason why a model does not fit in memory, with the fix, or an empty string if it fits.

    memory_bytes: the core's memory limit; None for the machine's memory.
    """
    needed, given = needed_bytes(parameters), memory_bytes or machine_bytes()
    if needed <= given or not parameters:
        return ""
    where, fix = (
        ("--memory gives", "raise --memory")
        if memory_bytes
        else ("this machine or container has", "give the core more memory")
    )
    return (
        f"a core with {parameters} trainable parameters needs {needed / 2**30:.1f} GiB of memory, but {where} "
        f"{given / 2**30:.1f}: use more shards, or {fix}"
    )
