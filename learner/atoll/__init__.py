"""Atoll: train one model on many islands of compute that never wait for each other.

`Learner` and `Follower` are imported on first use because they need torch. A machine that runs only a core does not
need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import atoll_wire as atoll_wire  # must come before any import of grpc: see `atoll_wire.forking`

if TYPE_CHECKING:
    from atoll.checkpoints.random_state import RandomState as RandomState
    from atoll.errors import FollowerError as FollowerError
    from atoll.errors import LearnerError as LearnerError
    from atoll.follower.follower import Follower as Follower
    from atoll.learner import Learner as Learner

__all__ = ["Follower", "FollowerError", "Learner", "LearnerError", "RandomState", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Learner":
        from atoll.learner import Learner  # noqa: PLC0415 - lazy, see above

        return Learner
    if name == "RandomState":
        from atoll.checkpoints.random_state import RandomState  # noqa: PLC0415 - lazy, see above

        return RandomState
    if name == "Follower":
        from atoll.follower.follower import Follower  # noqa: PLC0415 - lazy, see above

        return Follower
    if name in {"FollowerError", "LearnerError"}:
        from atoll import errors  # noqa: PLC0415

        return getattr(errors, name)
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("atoll")
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")
