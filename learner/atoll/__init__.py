"""Atoll: train one model on many islands of compute that never wait for each other.

`Learner` is imported on first use because it needs torch. A machine that runs only a core does not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import atoll_wire as atoll_wire  # must come before any import of grpc: see `atoll_wire.forking`

if TYPE_CHECKING:
    from atoll import data as data
    from atoll.checkpoints.random_state import RandomState as RandomState
    from atoll.errors import LearnerError as LearnerError
    from atoll.learner import Learner as Learner
    from atoll.stats import Stats as Stats

__all__ = ["Learner", "LearnerError", "RandomState", "Stats", "__version__", "data"]


def __getattr__(name: str) -> object:
    if name == "Learner":
        from atoll.learner import Learner  # noqa: PLC0415 - lazy, see above

        return Learner
    if name == "RandomState":
        from atoll.checkpoints.random_state import RandomState  # noqa: PLC0415 - lazy, see above

        return RandomState
    if name == "data":
        from importlib import import_module  # noqa: PLC0415

        return import_module("atoll.data")
    if name == "Stats":
        from atoll.stats import Stats  # noqa: PLC0415

        return Stats
    if name == "LearnerError":
        from atoll.errors import LearnerError  # noqa: PLC0415

        return LearnerError
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("atoll")
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
