"""Recognises DTensors and modules of FSDP2 without importing their library, which takes 45 MB and half a second.

A process that has such an object has already imported the library.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Returns whether a value is a DTensor."""
    return _is("torch.distributed.tensor", "DTensor", value)


def is_fsdp_module(value: object) -> TypeGuard[FSDPModule]:
    """Returns whether `fully_shard` manages a module."""
    return _is("torch.distributed.fsdp", "FSDPModule", value)


def _is(module: str, name: str, value: object) -> bool:
    kind = getattr(sys.modules.get(module), name, None)  # another thread may be importing the module
    return kind is not None and isinstance(value, kind)
