"""Troubles that an operator should fix, found by polling the run."""

from __future__ import annotations

from collections.abc import Iterator

from atoll_wire.contract import LearnerState

from atoll_server.rounds.liveness import NAMED, named
from atoll_server.run.registrar import Registrar
from atoll_server.run.watch import state_of
from atoll_server.telemetry.entries import Trouble

MISSED = 4  # a trouble: more merges per fragment than this without the work of a learner that trains
OTHER_TOKENS = 20.0  # tokens per step that differ by more than this factor may be in another unit
BEYOND = 1.02  # factor on --total-tokens; slightly more is normal, since learners leave at different times


def troubles(run: Registrar, damage: str, now: float) -> Iterator[Trouble]:
    """Yields the current troubles. damage: a damaged file that was found; empty if none. now: monotonic seconds."""
    if run.writer.full:
        yield _lasting("the disk is full: nothing is acknowledged until you free space")
    elif any(shard.spool.room_bytes == 0 for shard in run.shards):
        yield _lasting("the disk is nearly full: new contributions wait until you free space")
    if damage:
        yield _lasting(damage)
    if missing := _never_merged(run, now):
        yield _lasting(
            f"none of the work of {named(missing)} is merged: the answers arrive too late or are refused. "
            "`atoll receipts --learner NAME` says why; raise --overlap or --max-staleness, or use a faster link"
        )
    yield from _odd_tokens(run, now)
    total, trained = run.settings.total_tokens, run.registry.tokens()
    if total and trained > BEYOND * total:
        text = f"{trained:,} of {total:,} tokens were trained, so outer steps are plain means: raise --total-tokens"
        yield Trouble("total tokens", text)


def _lasting(text: str) -> Trouble:
    """Returns a trouble whose text does not change while it lasts."""
    return Trouble(text, text)


def _odd_tokens(run: Registrar, now: float) -> Iterator[Trouble]:
    """Yields the learners whose tokens per step differ so much from the others' that they may report another unit."""
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
    for name, told in (many or few)[:NAMED]:  # one list: two learners differ from each other
        yield Trouble(f"tokens of {name}", f"{told}. {fix}")


def _never_merged(run: Registrar, now: float) -> list[str]:
    """Returns the names of learners that train, but whose contributions are not merged."""
    late = max(MISSED, 1 + run.settings.max_staleness)  # merges of each fragment
    names = sorted(run.registry.entries)
    missed = [
        name
        for name in names
        if any(shard.contributions.missed(name) > late * len(shard.fragments) for shard in run.shards)
    ]
    return [name for name in missed if state_of(run, run.registry.entries[name], now) is LearnerState.LIVE]
