"""Rejected policies, which a recipe can apply to a fleet by name, so that the report can compare their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from atoll_forecast.fleet.fleet import Fleet
from atoll_server.rounds import syncer_events as ev
from atoll_server.rounds.liveness import LiveLearners
from atoll_server.rounds.round_state import CloseNow


def put_on(fleet: Fleet, policy: str) -> None:
    """Applies a policy by its name. Several names can be joined with +."""
    for name in policy.split("+"):
        POLICIES[name](fleet)


def weights_of_those_here(fleet: Fleet) -> None:
    """Applies the paper's weights, which sum to one in each merge, even if contributions are few or late."""
    [syncer] = fleet.syncers  # no recipe has both a policy and several shards
    close = syncer._close

    def closed(fragment: int, closing: CloseNow, present: LiveLearners) -> list[ev.Effect]:
        effects = close(fragment, closing, present)
        merge = next((effect for effect in effects if isinstance(effect, ev.Merge)), None)
        if merge is None:
            return effects
        rounds = syncer.fragments[fragment]
        rounds.ages[merge.version] = age = rounds.age(rounds.version) + 1
        return [replace(merge, shares=_normalised(merge.shares), age=age)]

    syncer._close = closed  # type: ignore[method-assign]


def _normalised(shares: Sequence[ev.Share]) -> tuple[ev.Share, ...]:
    whole = math.fsum(share.weight for share in shares)
    return tuple(replace(share, weight=share.weight / whole) for share in shares)


def late_waits(fleet: Fleet) -> None:
    """Applies the paper's rule that late contributions wait for the next round, even without a grace window."""
    [syncer] = fleet.syncers
    syncer._merges_late = lambda *_: False  # type: ignore[method-assign]


POLICIES: dict[str, Callable[[Fleet], None]] = {
    "late-waits": late_waits,
    "weights-of-those-here": weights_of_those_here,
}
