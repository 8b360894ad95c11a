"""Policies that were tried and are not Atoll's: put on a fleet by name, so that the report can say what each gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll_server import events as ev
from atoll_server.foresight.fleet import Fleet
from atoll_server.members import Present
from atoll_server.merge import OuterRule
from atoll_server.rounds import Closing

from benchmarks.quality.training import Training


def put_on(fleet: Fleet, policy: str) -> None:
    """NAME or NAME:NUMBER:NUMBER."""
    name, *numbers = policy.split(":")
    POLICIES[name](fleet, *map(float, numbers))


def warm_inner_steps(fleet: Fleet, first: float, outer_steps: float) -> None:
    """H grows from `first` to its full value over so many outer steps of a fragment, by equal ratios."""
    syncer, full = fleet.syncer, float(fleet.syncer.settings.inner_steps)

    def interval_s(present: Present) -> float | None:
        if present.fastest_step_s is None:
            return None
        done = sum(rounds.cycle for rounds in syncer.fragments) / len(syncer.fragments)
        steps = float(min(full, first * (full / first) ** (done / outer_steps)))
        return steps / len(syncer.fragments) * present.fastest_step_s

    syncer.interval_s = interval_s  # type: ignore[method-assign]


def warm_momentum(fleet: Fleet, outer_steps: float) -> None:
    """The outer momentum grows from zero to its full value over so many outer steps of a fragment."""
    work = fleet.work
    assert isinstance(work, Training), "what is trained"
    full = work.rule

    def rule(version: int) -> OuterRule:
        whole = full(version)
        return replace(whole, momentum=whole.momentum * min(1.0, version / outer_steps))

    work.rule = rule  # type: ignore[method-assign]


def warm_both(fleet: Fleet, first: float, outer_steps: float) -> None:
    """Both of the above, over the same outer steps."""
    warm_inner_steps(fleet, first, outer_steps)
    warm_momentum(fleet, outer_steps)


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


POLICIES: dict[str, Callable[..., None]] = {
    "warm-H": warm_inner_steps,
    "warm-momentum": warm_momentum,
    "warm-both": warm_both,
    "weights-of-all": weights_of_all,
}
