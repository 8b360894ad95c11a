"""Records learners' reports, which contain training progress, declined rounds and adopted versions."""

from __future__ import annotations

import math
from dataclasses import replace

import structlog
from atoll_wire import outer_pb2 as pb
from atoll_wire.contract import REPORTED

from atoll_server.access.refusals import Refused, Status
from atoll_server.learners.learner_counters import IncarnationCounters
from atoll_server.learners.learner_registry import RegistryEntry
from atoll_server.rounds import syncer_events as ev
from atoll_server.run.known_run import KnownRun
from atoll_server.shard.shard import Shard
from atoll_server.telemetry import entries

log = structlog.get_logger()

LONGEST_REASON = 200  # longer reasons for declining a round are truncated to this many characters
MEASURED_S = 0.5  # a step time measured over a shorter time is not used, since reports may be delayed
MAX_REPORTED = 2 * REPORTED  # limit on the declined rounds and adopted versions in one report, counted together


def progress(run: KnownRun, most: int, entry: RegistryEntry, seen: pb.Progress) -> None:
    """Records a learner's report and passes its contents to the shard.

    Ignores the report of a learner whose Leave is being saved, which contained newer numbers. most: limit on the
    reported tokens and on the reported steps. Raises Refused if the report exceeds a limit.
    """
    if entry.account.left_at is not None:
        return
    if max(seen.tokens, seen.steps, seen.abandoned_tokens) > most:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f'learner "{entry.name}" reports more than {most} tokens or steps (the limit): check step(tokens=...)',
        )
    if len(seen.declined) + len(seen.adopted) > MAX_REPORTED:
        raise Refused(
            Status.INVALID_ARGUMENT,
            f'learner "{entry.name}" reports {len(seen.declined) + len(seen.adopted)} declined rounds '
            f"and adopted versions in one report: send at most {MAX_REPORTED}",
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
    # Tokens are also held back while no other learner has a rate, which is not this learner's fault.
    compared = run.registry.rates(wall).usual(entry.name) is not None
    if compared and 2 * spent.tokens < seen.tokens and not entry.capped:
        entry.capped = True
        log.warning(
            "a learner reports more tokens than it could have trained: check step(tokens=...), or evict the learner",
            learner=entry.name,
            reported=seen.tokens,
            counted=spent.tokens,
        )
    if seen.steps:  # before its first step, a restarted process has no loss of its own
        entry.account.loss = seen.loss if math.isfinite(seen.loss) else None
    entry.unsaved = True
    entry.recovery = replace(
        entry.recovery,
        prepared_s=seen.prepared_s,
        joining_s=entry.account.current.joining_s,
        first_step_s=seen.first_step_s,
    )
    run.links.measured(entry.name, seen.round_trip_s)
    run.tell()
    if (shard := run.shard) is None:
        return
    shard.dispatch(ev.Reported(entry.name, spent.steps, seen.paused))
    observed = shard.syncer.liveness[entry.name]
    # Until this process's step time is known, other learners are compared with the previous process's rate.
    if observed.step_time_s is not None and observed.measured_s() >= MEASURED_S:
        entry.account.step_time_s = observed.step_time_s
    _take_answers(shard, entry, seen)


def _take_answers(shard: Shard, entry: RegistryEntry, seen: pb.Progress) -> None:
    """Passes each declined round and each adopted version to the syncer only once, although reports repeat them.

    Cycles and versions only increase. A value that is not greater than its fragment's last value is a repetition. A
    value above the fragment's current cycle or version is invalid. Repetitions and invalid values are ignored.
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
