"""Policies that were tried and are not Atoll's: put on a fleet by name, so that the report can say what each gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll_server import events as ev
from atoll_server.foresight.fleet import Fleet
from atoll_server.members import Present
from atoll_server.rounds import Closing


def put_on(fleet: Fleet, policy: str) -> None:
    """By its name."""
    POLICIES[policy](fleet)


def weights_of_those_here(fleet: Fleet) -> None:
    """Weights of a merge always sum to one, however few it has and however late they are: the paper's."""
    syncer = fleet.syncer
    close = syncer._close

    def closed(fragment: int, closing: Closing, present: Present) -> list[ev.Effect]:
        return [
            replace(effect, shares=_normalised(effect.shares)) if isinstance(effect, ev.Merge) else effect
            for effect in close(fragment, closing, present)
        ]

    syncer._close = closed  # type: ignore[method-assign]


def _normalised(shares: Sequence[ev.Share]) -> tuple[ev.Share, ...]:
    whole = math.fsum(share.weight for share in shares)
    return tuple(replace(share, weight=share.weight / whole) for share in shares)


POLICIES: dict[str, Callable[[Fleet], None]] = {"weights-of-those-here": weights_of_those_here}
