"""Policies that were tried and are not Atoll's: put on a fleet by name, so that the report can say what each gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll_server.foresight.fleet import Fleet
from atoll_server.members import Present
from atoll_server.merge import OuterRule

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


POLICIES: dict[str, Callable[..., None]] = {"warm-H": warm_inner_steps, "warm-momentum": warm_momentum}
