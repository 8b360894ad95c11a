"""Policies that were tried and are not Atoll's: put on a fleet by name, so that the report can say what each gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll_server import events as ev
from atoll_server.foresight.fleet import Fleet
from atoll_server.rounds import Closing


def put_on(fleet: Fleet, policy: str) -> None:
    """By its name."""
    POLICIES[policy](fleet)


def weights_of_all(fleet: Fleet) -> None:
    """A merge of few is a small step: weights are normalised by what all live learners gave last, not by those here."""
    syncer, last = fleet.syncer, dict[tuple[int, str], float]()
    close = syncer._close

    def closed(fragment: int, closing: Closing, now: float) -> list[ev.Effect]:
        version, exponent = syncer.fragments[fragment].version, syncer.settings.staleness_exponent
        raw = {
            key.learner: syncer.weigh(p.tokens, p.steps, version - p.base_version, exponent)
            for key, p in syncer.fragments[fragment].pending.items()
        }
        effects = close(fragment, closing, now)
        for place, effect in enumerate(effects):
            if isinstance(effect, ev.Merge):
                here = {share.key.learner for share in effect.shares}
                for name in here:
                    last[fragment, name] = raw[name]
                given = sum(raw[name] for name in here)
                missing = sum(last.get((fragment, name), 0.0) for name in syncer.present(now).live - here)
                part = given / (given + missing)
                shares = tuple(replace(share, weight=share.weight * part) for share in effect.shares)
                effects[place] = replace(effect, shares=shares)
        return effects

    syncer._close = closed  # type: ignore[method-assign]


POLICIES: dict[str, Callable[[Fleet], None]] = {
    "weights-of-all": weights_of_all,
}
