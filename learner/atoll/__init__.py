"""Atoll: train one model on many islands of compute that never wait for each other.

`Learner` and `Follower` are imported on first use because they need torch. A machine that runs only a core does not
need torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

import atoll_wire as atoll_wire  # must come before any import of grpc: see `atoll_wire.forking`

if TYPE_CHECKING:
    from atoll import data as data
    from atoll.checkpoints.random_state import RandomState as RandomState
    from atoll.errors import FollowerError as FollowerError
    from atoll.errors import LearnerError as LearnerError
    from atoll.follower.follower import Follower as Follower
    from atoll.learner import Learner as Learner
    from atoll.stats import Stats as Stats

__all__ = ["Follower", "FollowerError", "Learner", "LearnerError", "RandomState", "Stats", "__version__", "data"]


# The module of each public name. Names are imported on first use.
PLACES = {
    "Follower": "atoll.follower.follower",
    "FollowerError": "atoll.errors",
    "Learner": "atoll.learner",
    "LearnerError": "atoll.errors",
    "RandomState": "atoll.checkpoints.random_state",
    "Stats": "atoll.stats",
}


def __getattr__(name: str) -> object:
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    if name == "data":
        return import_module("atoll.data")
    if name == "__version__":
        return version("atoll")
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
