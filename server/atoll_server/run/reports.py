"""What learners tell of themselves: how training goes, and that they leave."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import REPORTED

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.accounts import Spent
from atoll_server.learners.registry import Entry
from atoll_server.rounds import events as ev
from atoll_server.run.core import Core
from atoll_server.shard.engine import Engine
from atoll_server.storage import ledger

log = structlog.get_logger()

MOST_REPORTED = 2 * REPORTED  # declined rounds and adoptions together


def progress(core: Core, entry: Entry, seen: pb.Progress) -> None:
    """Takes in a report. Raises Refused for counters that no training could reach."""
    most = core.settings.limits.tokens
    if max(seen.tokens, seen.steps, seen.abandoned_tokens) > most:
        raise Refused(Status.INVALID_ARGUMENT, f'learner "{entry.name}" reports more than {most} tokens or steps')
    if len(seen.declined) + len(seen.adopted) > MOST_REPORTED:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f'learner "{entry.name}" reports {len(seen.declined) + len(seen.adopted)} rounds and adoptions at a '
            f"time: at most {MOST_REPORTED} are taken",
        )
    spent = Spent(
        steps=seen.steps, tokens=seen.tokens, stepping_s=seen.stepping_s, blocked_s=seen.blocked_s,
        joining_s=seen.joining_s, paused_s=seen.paused_s, abandoned_tokens=seen.abandoned_tokens,
    )  # fmt: skip
    entry.reports.saw(time.monotonic())
    wall = core.clock.now()
    entry.account.heard(wall, spent, core.roster.rates(wall).most(entry.name))
    if 2 * spent.tokens < seen.tokens and not entry.doubted:
        entry.doubted = True
        log.warning(
            "a learner reports more than it can have trained: look at it, and evict it with --tokens if it is not so",
            learner=entry.name, reported=seen.tokens, counted=spent.tokens,
        )  # fmt: skip
    entry.loss, entry.dirty = seen.loss, True
    entry.comeback = replace(
        entry.comeback, prepared_s=seen.prepared_s, joining_s=entry.account.current.joining_s,
        first_step_s=seen.first_step_s,
    )  # fmt: skip
    if core.engine is None:
        return
    core.engine.dispatch(ev.Heard(entry.name, spent.steps, seen.paused))
    entry.account.step_time_s = core.engine.syncer.members[entry.name].step_time_s
    _take_answers(core.engine, entry, seen)


def _take_answers(engine: Engine, entry: Entry, seen: pb.Progress) -> None:
    """Tells the syncer of rounds declined and versions adopted, each once: work is bounded by what there was to answer.

    Cycles and versions grow, so what is not above the newest one told of that fragment was told, or never was.
    """
    rounds = engine.syncer.fragments
    for declined in seen.declined:
        fragment, cycle = declined.fragment, declined.cycle
        if fragment < len(rounds) and entry.declined.get(fragment, 0) < cycle <= rounds[fragment].cycle:
            entry.declined[fragment] = cycle
            engine.dispatch(ev.Declined(entry.name, fragment, cycle, declined.reason[:200]))
    for adopted in seen.adopted:
        fragment, version = adopted.fragment, adopted.version
        if fragment < len(rounds) and entry.adopted.get(fragment, 0) < version <= rounds[fragment].version:
            entry.adopted[fragment] = version
            engine.dispatch(ev.Adopted(entry.name, fragment, version))


async def leave(core: Core, entry: Entry, last: pb.Progress | None) -> None:
    """A clean good-bye: durable, so that it is not taken for lost after a restart."""
    if last is not None:
        progress(core, entry, last)
    entry.account.left_at = core.clock.now()
    entry.token = b""
    await core.writer.commit(partial(ledger.put_learner, row=core.row(entry)))
    if core.engine is not None:
        core.engine.dispatch(ev.Gone(entry.name))
    if not entry.token:  # nor did it join again meanwhile
        entry.speaks(b"", Refused(Status.UNAUTHENTICATED, f'learner "{entry.name}" has left: join again'))
    log.info("left", learner=entry.name, incarnation=entry.incarnation)
