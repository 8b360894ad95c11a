"""Learners' reports: training progress, declined rounds, and adopted versions."""

from __future__ import annotations

from dataclasses import replace

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import REPORTED

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.goodput import IncarnationCounters
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.rounds import syncer_events as ev
from atoll_server.run.registrar import Registrar
from atoll_server.shard.shard import Shard
from atoll_server.telemetry import entries

log = structlog.get_logger()

LONGEST_REASON = 200  # limit on the kept characters of a declined round's reason
MEASURED_S = 0.5  # shortest duration of a usable step time measurement, since reports may be delayed
MAX_REPORTED = 2 * REPORTED  # limit on declined rounds and adoptions together in one report


def progress(run: Registrar, most: int, entry: RegistryEntry, seen: pb.Progress) -> None:
    """Records a report. most: limit on a learner's tokens and on its steps. Raises Refused above a limit."""
    if max(seen.tokens, seen.steps, seen.abandoned_tokens) > most:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f'learner "{entry.name}" reports more tokens or steps than {most} (the limit): check step(tokens=...)',
        )
    if len(seen.declined) + len(seen.adopted) > MAX_REPORTED:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f'learner "{entry.name}" reports {len(seen.declined) + len(seen.adopted)} rounds and adoptions at '
            f"once: at most {MAX_REPORTED} are accepted",
        )
    spent = IncarnationCounters(
        steps=seen.steps,
        tokens=seen.tokens,
        stepping_s=seen.stepping_s,
        blocked_s=seen.blocked_s,
        joining_s=seen.joining_s,
        paused_s=seen.paused_s,
        abandoned_tokens=seen.abandoned_tokens,
    )
    entry.reports.saw(run.clock.monotonic())
    wall = run.clock.wall()
    run.registry.heard(entry, wall, spent)
    # While no other learner has a rate, tokens are held back. This is not a fault of the learner.
    compared = run.registry.rates(wall).usual(entry.name) is not None
    if compared and 2 * spent.tokens < seen.tokens and not entry.capped:
        entry.capped = True
        log.warning(
            "a learner reports more than it can have trained: check the learner, or evict it with --tokens",
            learner=entry.name,
            reported=seen.tokens,
            counted=spent.tokens,
        )
    entry.loss, entry.unsaved = seen.loss, True
    entry.recovery = replace(
        entry.recovery,
        prepared_s=seen.prepared_s,
        joining_s=entry.account.current.joining_s,
        first_step_s=seen.first_step_s,
    )
    run.tell()
    for shard in run.shards:
        shard.dispatch(ev.Reported(entry.name, spent.steps, seen.paused))
        observed = shard.syncer.liveness[entry.name]
        # Until the new process has a known step time, the previous process's rate stays the reference for others.
        if observed.step_time_s is not None and observed.measured_s() >= MEASURED_S:
            entry.account.step_time_s = observed.step_time_s
        _take_answers(shard, entry, seen)


def _take_answers(shard: Shard, entry: RegistryEntry, seen: pb.Progress) -> None:
    """Passes declined rounds and adopted versions to the syncer, each once, so that repeats cost no work.

    Cycles and versions grow. A number that is not above its fragment's newest was passed before, or never existed.
    """
    rounds = shard.syncer.fragments
    for declined in seen.declined:
        fragment, cycle = declined.fragment, declined.cycle
        if fragment in rounds and entry.declined.get(fragment, 0) < cycle <= rounds[fragment].cycle:
            entry.declined[fragment] = cycle
            reason = declined.reason[:LONGEST_REASON]
            shard.context.record(entries.Declined(entry.name, fragment, cycle, reason))
            shard.dispatch(ev.Declined(entry.name, fragment, cycle, reason))
    for adopted in seen.adopted:
        fragment, version = adopted.fragment, adopted.version
        if fragment in rounds and entry.adopted.get(fragment, 0) < version <= rounds[fragment].version:
            entry.adopted[fragment] = version
            shard.context.record(entries.Adopted(entry.name, fragment, version))
            shard.dispatch(ev.Adopted(entry.name, fragment, version))
