"""Finds a run's current troubles, which an operator should fix."""

from __future__ import annotations

from collections.abc import Iterator

from atoll_wire.contract import LearnerState

from atoll_server.rounds.liveness import NAMED, named
from atoll_server.run.known_run import KnownRun
from atoll_server.run.registrar import Registrar
from atoll_server.run.watch import state_of
from atoll_server.telemetry.entries import Trouble

MISSED = 4  # a live learner is reported after more than this many merges per fragment without its work
OTHER_TOKENS = 20.0  # if tokens per step differ by more than this factor, one learner may count something else
BEYOND = 1.02  # exceeding --total-tokens by up to this factor is normal, since learners end at different times


def troubles(run: Registrar, damage: str, now: float) -> Iterator[Trouble]:
    """Yields the run's current troubles.

    damage: description of a damaged file; empty if there is none. now: monotonic seconds.
    """
    yield from shard_troubles(run, damage, now)
    if missing := run.attached.waited_for():
        effect = "the run cannot begin" if run.shard is None else "some fragments may not sync"
        yield _lasting(f"the registrar lacks {missing}, so {effect}: start each missing shard")
    for shard in run.attached.all():
        for text in shard.summary.troubles if shard.outbox is not None else ():
            yield _lasting(f"shard {shard.number}: {text}")
    if text := run.refused_joins.text(now):
        yield Trouble("refused joins", text)
    yield from _odd_tokens(run, now)
    total, trained = run.settings.total_tokens, run.registry.tokens()
    if total and trained > BEYOND * total:
        effect = ", so outer steps are plain means" if run.settings.outer_cool_down else ""
        text = f"the run is at {trained:,} of {total:,} tokens{effect}: raise --total-tokens"
        yield Trouble("total tokens", text)


def shard_troubles(run: KnownRun, damage: str, now: float) -> Iterator[Trouble]:
    """Yields the current troubles of this process and its shard. damage, now: as in `troubles`."""
    if run.writer.full:
        yield _lasting("the disk is full: the core acknowledges no contributions until you free space")
    elif run.shard is not None and run.shard.spool.room_bytes == 0:
        yield _lasting("the disk is nearly full: new contributions wait until you free space")
    if damage:
        yield _lasting(damage)
    if missing := _never_merged(run, now):
        yield _lasting(
            f"no work from {named(missing)} is being merged: {'its' if len(missing) == 1 else 'their'} contributions "
            "do not arrive in time, or are refused. `atoll receipts --learner NAME` says why. If they arrive late, "
            "raise --overlap or --max-staleness, or use a faster link"
        )


def _lasting(text: str) -> Trouble:
    """Returns a trouble whose text does not change while it lasts."""
    return Trouble(text, text)


def _odd_tokens(run: Registrar, now: float) -> Iterator[Trouble]:
    """Yields troubles for learners whose tokens per step are far above or far below the other learners' median."""
    rates = run.registry.rates(run.clock.at(now))
    many, few = [], []
    for name in sorted(run.registry.entries):
        own, usual = rates.of(name), rates.usual(name)
        if own is None or usual is None or state_of(run, run.registry.entries[name], now) is not LearnerState.LIVE:
            continue
        told = f"{name} reports {own.batch:,.0f} tokens per step vs. the other learners' median of {usual.batch:,.0f}"
        if own.batch > OTHER_TOKENS * usual.batch:
            many.append((name, f"{told}, so its work outweighs theirs"))
        elif own.batch * OTHER_TOKENS < usual.batch:
            few.append((name, f"{told}, so its work hardly counts"))
    fix = "Check that it passes its own tokens to step(tokens=...), not bytes, sequences or all learners' tokens"
    for name, told in (many or few)[:NAMED]:  # not both: with two learners, one wrong count would name both
        yield Trouble(f"tokens of {name}", f"{told}. {fix}")


def _never_merged(run: KnownRun, now: float) -> list[str]:
    """Returns the names of live learners whose contributions have not been merged for many rounds."""
    late = max(MISSED, 1 + run.settings.max_staleness)  # merges per fragment
    if (shard := run.shard) is None:
        return []
    most = late * len(shard.fragments)
    missed = [name for name in sorted(run.registry.entries) if shard.contributions.missed(name) > most]
    return [name for name in missed if state_of(run, run.registry.entries[name], now) is LearnerState.LIVE]
